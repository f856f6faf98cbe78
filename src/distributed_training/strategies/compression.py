"""Gradients made smaller for the network: hooks of DistributedDataParallel."""

# No `from __future__ import annotations` here: DDP compares the annotations of a hook with types.

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel

from distributed_training.config import StrategyConfig
from distributed_training.runtime.errors import ConfigError
from distributed_training.runtime.group import Group


def compress_gradients(model: DistributedDataParallel, config: StrategyConfig, group: Group) -> None:
    """Register the hook that `strategy.compression` names."""
    if config.compression == "none":
        return
    if config.compression in group.wires:
        model.register_comm_hook(group, _on_the_wire(config.compression))
    elif config.compression == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif config.compression == "bf16":
        model.register_comm_hook(None, _bf16)
    elif config.compression == "powersgd":
        state = powersgd.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=config.powersgd_rank,
            start_powerSGD_iter=config.powersgd_start_step,
            warm_start=config.powersgd_warm_start,
            use_error_feedback=True,
        )
        hook = powersgd.powerSGD_hook
        model.register_comm_hook(state, hook if group.callbacks_may_wait else _one_at_a_time(hook))
    elif config.compression == "batched_powersgd":
        model.register_comm_hook(BatchedPowerSGD(config), _batched_powersgd)
    else:
        raise ConfigError(
            f"strategy.compression={config.compression} is nothing that {group.backend} can do: use fp16, bf16 or "
            "powersgd, or strategy.backend=mpi"
        )


def _on_the_wire(wire: str) -> Any:
    """Gradients as they are up to the backend, which makes smaller what it sends, and adds up in full precision."""

    def run(group: Group, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        if buffer.dtype != torch.float32:  # half the bytes already, or more digits asked for than a wire has
            return default_hooks.allreduce_hook(None, bucket)  # type: ignore[arg-type]
        return group.mean_compressed(buffer, wire).then(lambda _: buffer)

    return run


def _bf16(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's own hook of this kind asks for NCCL; Gloo can do it too."""
    buffer = bucket.buffer()
    small = buffer.to(torch.bfloat16).div_(dist.get_world_size())
    future = dist.all_reduce(small, async_op=True).get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0]))


def _one_at_a_time(hook: Any) -> Any:
    """PowerSGD sends twice a bucket, the second time from a callback that runs in one of Gloo's few threads and waits
    there. With several buckets under way all of these threads can come to wait for each other, so each is finished
    before the next begins."""

    def run(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = hook(state, bucket)
        future.wait()
        return future

    return run


class BatchedPowerSGD:
    """PowerSGD on a whole bucket as one square matrix: fewer, larger products, and a coarser approximation.

    torch has such a hook too, but it hands its matrices to a function that takes only batches of them.
    """

    def __init__(self, config: StrategyConfig) -> None:
        self._rank, self._warm = config.powersgd_rank, config.powersgd_warm_start
        self._whole_steps = config.powersgd_start_step
        self._errors: dict[int, torch.Tensor] = {}
        self._factors: dict[int, torch.Tensor] = {}
        self._steps = 0

    def reduce(self, bucket: dist.GradBucket) -> torch.Tensor:
        """The mean of a bucket over all ranks, nearly. What it leaves out is added to the next step's gradient."""
        number, gradient, ranks = bucket.index(), bucket.buffer(), dist.get_world_size()
        step = self._steps
        self._steps += bucket.is_last()
        side = math.ceil(math.sqrt(len(gradient)))
        rank = min(self._rank, side)
        if step < self._whole_steps or 2 * side * rank >= len(gradient):  # nothing to gain on a small one
            dist.all_reduce(gradient)
            return gradient.div_(ranks)
        matrix = torch.zeros(side * side, dtype=gradient.dtype, device=gradient.device)
        matrix[: len(gradient)] = gradient
        if number in self._errors:
            matrix += self._errors[number]
        square = matrix.view(side, side)
        right = self._factors[number] if self._warm and number in self._factors else self._random(square, rank, step)
        left = square @ torch.linalg.qr(right).Q
        dist.all_reduce(left)
        left = torch.linalg.qr(left).Q
        right = square.t() @ left
        dist.all_reduce(right)
        self._factors[number] = right.div_(ranks)
        shared = (left @ right.t()).view(-1)
        self._errors[number] = matrix - shared
        gradient.copy_(shared[: len(gradient)])
        return gradient

    def _random(self, like: torch.Tensor, rank: int, step: int) -> torch.Tensor:
        """The same on every rank, and another one in each step."""
        generator = torch.Generator().manual_seed(step)
        return torch.randn(len(like), rank, generator=generator, dtype=like.dtype).to(like.device)


def _batched_powersgd(state: BatchedPowerSGD, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    devices: Any = [bucket.buffer().device] if bucket.buffer().is_cuda else None
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
    future.set_result(state.reduce(bucket))
    return future
