"""Horovod: every rank has the whole model; gradients are summed by Horovod while backward goes on."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distributed_training.runtime.errors import ConfigError, ModelError, RanksError
from distributed_training.runtime.horovod import HorovodGroup
from distributed_training.strategies.base import Place, StepResult, StepSettings
from distributed_training.strategies.batchnorm import synchronise_batchnorm
from distributed_training.strategies.distributed import Distributed, check_same_model
from distributed_training.strategies.portable import parameter_names

_LOOK = 2e-4  # seconds between two looks whether a gradient has come
_SENT = (torch.float16, torch.float32, torch.float64)


class Horovod(Distributed):
    """After Horovod's exchange every rank holds the same gradients, so that each takes the same step."""

    name = "horovod"
    group: HorovodGroup

    def __init__(self, place: Place) -> None:
        if place.config.compression not in ("none", "fp16"):
            raise ConfigError(
                f"strategy.compression={place.config.compression} is nothing that Horovod can do: "
                "use none or fp16, or strategy=ddp"
            )
        super().__init__(place)
        self.exact = place.config.compression == "none"
        self._exchange: Any = None

    def join(self, place: Place) -> HorovodGroup:
        return HorovodGroup(place.world, place.device, place.deadline)

    def setup(self, model: nn.Module, optimizer: Optimizer | None, settings: StepSettings) -> nn.Module:
        if hasattr(optimizer, "skip_synchronize"):
            raise ConfigError(
                "the optimizer is a horovod DistributedOptimizer already: give the plain one, strategy=horovod wraps it"
            )
        self._end_exchange()
        if self.config.sync_batchnorm:
            synchronise_batchnorm(model, self)
        self.start_alike(model)
        if optimizer is not None:
            self._start_optimizers_alike(optimizer)
        forward = super().setup(model, optimizer, settings)
        if optimizer is not None:
            self._exchange = self._begin_exchange(model, optimizer)
        return forward

    def start_alike(self, model: nn.Module) -> None:
        check_same_model(self, model)
        named = [*model.named_parameters(), *model.named_buffers()]
        for name, tensor in named:
            if not tensor.is_contiguous():
                raise ModelError(
                    f"{name} is not contiguous in memory (channels_last?), and Horovod sends nothing else: call "
                    "model.to(memory_format=torch.contiguous_format), or use strategy=ddp"
                )
        # As bytes: Horovod does not know all types that a buffer may have.
        parts = [(f"start.{name}", tensor.detach().reshape(-1).view(torch.uint8)) for name, tensor in named]
        with self.watch.waiting("the weights of rank 0"):
            self.group.library.broadcast_parameters(parts, root_rank=0)

    def _start_optimizers_alike(self, optimizer: Optimizer) -> None:
        """Rank 0's optimizer state on every rank, where an optimizer that has taken steps is given."""
        used = self.gather_values(bool(optimizer.state))
        if len(set(used)) > 1:
            fresh = used.index(False)
            raise RanksError(
                f"the optimizer of rank {used.index(True)} has taken steps and that of rank {fresh} has not: "
                "start all ranks with the same optimizer"
            )
        # A fresh one has nothing to send, and Horovod would take a step to make it a state: no training of ours.
        if used[0]:
            with self.watch.waiting("the optimizer state of rank 0"):
                self.group.library.broadcast_optimizer_state(optimizer, root_rank=0)

    def _begin_exchange(self, model: nn.Module, optimizer: Optimizer) -> Any:
        """Horovod's hooks on the parameters: a gradient is sent as soon as it is ready.

        The steps are taken by the user's own optimizer: learning rates set on it, its state, hooks and fused kernels
        count as always. Horovod's is made by calling the optimizer's class again, which not all classes allow, so
        it is given the plainest one over the same parameters, which never takes a step.
        """
        hvd = self.group.library
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._named = dict(zip(parameter_names(model, optimizer), parameters))
        for name, parameter in self._named.items():
            if parameter.requires_grad and parameter.dtype not in _SENT:
                raise ModelError(
                    f"{name} is {str(parameter.dtype).removeprefix('torch.')}, which Horovod cannot add up: keep "
                    "parameters in float32 (training.precision=bf16 computes in half precision from them)"
                )
        return hvd.DistributedOptimizer(
            torch.optim.SGD(parameters, lr=0.0),
            named_parameters=[(f"gradient.{name}", p) for name, p in self._named.items()],
            compression=getattr(hvd.Compression, self.config.compression),
            op=hvd.Sum,
        )

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        # Horovod counts down the backward passes of each parameter and sends at zero, wanting to know their number
        # beforehand. Here it may differ from step to step, so the count starts anew in every micro-batch: from 2,
        # which one pass does not bring to zero, or from 1, which the last one does.
        self._exchange.set_backward_passes_per_step(1 if last else 2)
        return nullcontext()

    def step(self, loss: Tensor) -> StepResult:
        if self.world_size > 1:
            self._sum_gradients()
        return super().step(loss)

    def _sum_gradients(self) -> None:
        """Wait for what is on its way, so that clipping and the guard see the gradients of all ranks."""
        used_by = self._used_by() if self.config.find_unused_parameters else self._all_used()
        self.watch.begin(f"the gradients of step {self._steps}")
        if self.device.type == "cpu":
            self._wait_asleep()
        self._exchange.synchronize()
        # Horovod sends zeros for a gradient that is not there. Where no rank has one, the optimizer must not see them:
        # it would move the parameter by its momentum and weight decay.
        for count, parameter in zip(used_by, self._named.values()):
            if not count:
                parameter.grad = None

    def _wait_asleep(self) -> None:
        """Until the gradients are there. Horovod would look without a pause, and take the core from its own threads.

        Not where it has still to send zeros for a gradient that this rank does not have: another rank, asleep here too,
        may wait for these.
        """
        under_way = self._exchange._handles
        handles = [handle for handle, _ in under_way.values()]
        if None in handles or any(p not in under_way for p in self._exchange._requires_update):
            return
        for handle in handles:
            while not self.group.library.poll(handle):
                time.sleep(_LOOK)

    def _all_used(self) -> list[int]:
        """Nothing to ask the others, where every parameter has a gradient."""
        unused = [name for name, p in self._named.items() if p.requires_grad and p.grad is None]
        if unused:
            raise ModelError(
                f"rank {self.rank}: {', '.join(unused[:3])} got no gradient in step {self._steps}; freeze what the "
                "model does not use (requires_grad=False), or set strategy.find_unused_parameters=true"
            )
        return []

    def _used_by(self) -> list[int]:
        """How many ranks have a gradient of each parameter."""
        own = torch.tensor([p.grad is not None for p in self._named.values()], dtype=torch.int32)
        counts: list[int] = self.reduce(own.to(self.device)).tolist()
        return counts

    def teardown(self) -> None:
        self._end_exchange()
        super().teardown()

    def _end_exchange(self) -> None:
        """Horovod's hooks cannot be taken off the parameters; so that they send no more, they are told to wait."""
        if self._exchange is not None:
            self._exchange.set_backward_passes_per_step(sys.maxsize)
            self._exchange = None
