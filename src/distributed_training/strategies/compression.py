"""Gradients made smaller for the network: hooks of DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel

from distributed_training.config import StrategyConfig
from distributed_training.runtime.group import Group


def compress_gradients(model: DistributedDataParallel, config: StrategyConfig, group: Group) -> None:
    """Register the hook that `strategy.compression` names."""
    if config.compression == "none":
        return
    if config.compression == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif config.compression == "bf16":
        model.register_comm_hook(None, _bf16)
    else:
        batched = config.compression == "batched_powersgd"
        state = powersgd.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=config.powersgd_rank,
            start_powerSGD_iter=config.powersgd_start_step,
            warm_start=config.powersgd_warm_start,
            use_error_feedback=True,
        )
        hook = powersgd.batched_powerSGD_hook if batched else powersgd.powerSGD_hook
        model.register_comm_hook(state, _one_at_a_time(hook) if group.backend == "gloo" else hook)


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
