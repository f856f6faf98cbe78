"""What the strategies over a torch.distributed group have in common: joining it, and values between ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distributed_training.runtime.errors import RanksError
from distributed_training.runtime.group import Group
from distributed_training.runtime.imports import import_object
from distributed_training.strategies.base import Place, StepResult, StepSettings
from distributed_training.strategies.single import SingleDevice

# Backends that need more than a name of torch's.
_GROUPS = {"mpi": "distributed_training.native.mpi.group:MPIGroup"}


class Distributed(SingleDevice):
    """Ranks that talk through torch.distributed. A step is still `single`'s; subclasses change what they must."""

    def __init__(self, place: Place) -> None:
        if place.device.type == "cuda":
            index = place.device.index if place.device.index is not None else torch.cuda.current_device()
            place = replace(place, device=torch.device("cuda", index))
            torch.cuda.set_device(place.device)
        super().__init__(place)
        self.config, self.world = place.config, place.world
        self.rank, self.world_size = place.world.rank, place.world.size
        self.group = self.join(place)
        self.watch = self.group.watch
        self._steps = 0

    def join(self, place: Place) -> Group:
        """Connect with the other ranks, through the backend that the config names."""
        backend = place.config.backend
        kind: type[Group] = import_object(_GROUPS[backend], "strategy.backend") if backend in _GROUPS else Group
        return kind(place.world, place.device, place.deadline, backend)

    def start_alike(self, model: nn.Module) -> None:
        """Rank 0's weights on every rank, after a check that it is the same model everywhere."""
        check_same_model(self, model)
        model.to(self.device)
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                self.group.broadcast(tensor.detach())

    def backward(self, loss: Tensor) -> None:
        self.watch.begin(f"the gradients of step {self._steps}")
        try:
            super().backward(loss)
            self.exchange()
        except BaseException:  # no wait any longer, whatever the user makes of it
            self.watch.end()
            raise

    def exchange(self) -> None:
        """Wait for gradients that travel otherwise than inside backward."""

    def setup(self, model: nn.Module, optimizer: Optimizer | None, settings: StepSettings) -> nn.Module:
        forward = super().setup(model, optimizer, settings)
        self._looks_at_loss = settings.nonfinite == "loss" or self._scaler is not None
        return forward

    def step(self, loss: Tensor) -> StepResult:
        if self._looks_at_loss:  # each rank has its part of it, but all must decide alike
            loss = self.reduce(loss)
        result = super().step(loss)
        self.step_done()
        return result

    def step_done(self) -> None:
        """The step's waits are over."""
        self._steps += 1
        self.watch.end()

    def waiting(self, operation: str) -> AbstractContextManager[Any]:
        return self.watch.waiting(operation)

    def heed(self, told_to_stop: Callable[[], bool]) -> None:
        self.watch.told_to_stop = told_to_stop

    def reduce(self, value: Tensor) -> Tensor:
        return self.group.sum(value)

    def gather(self, value: Tensor) -> Tensor:
        return self.group.gather(value)

    def broadcast(self, value: Tensor) -> Tensor:
        return self.group.broadcast(value)

    def barrier(self) -> None:
        self.group.barrier()

    def teardown(self) -> None:
        super().teardown()
        self.group.close()


def check_same_model(strategy: SingleDevice, model: nn.Module) -> None:
    """Refuse to train different models together, naming the ranks and the first difference."""
    own = {name: [list(p.shape), str(p.dtype), p.requires_grad] for name, p in model.named_parameters()}
    everyone = strategy.gather_values({"model": type(model).__name__, "parameters": own})
    first = everyone[0]
    for rank, other in enumerate(everyone):
        if other == first:
            continue
        names = [*first["parameters"], *(n for n in other["parameters"] if n not in first["parameters"])]
        for name in names:
            here, there = first["parameters"].get(name), other["parameters"].get(name)
            if here != there:
                raise RanksError(
                    f"ranks 0 and {rank} have different models: parameter {name} is {_words(here)} on rank 0 and "
                    f"{_words(there)} on rank {rank} (docs/troubleshooting.md#ranks-differ)"
                )
        raise RanksError(
            f"ranks 0 and {rank} have different models: {first['model']} and {other['model']} "
            "(docs/troubleshooting.md#ranks-differ)"
        )


def _words(parameter: list[object] | None) -> str:
    return "not there" if parameter is None else f"{parameter[0]} {parameter[1]}{'' if parameter[2] else ', frozen'}"
