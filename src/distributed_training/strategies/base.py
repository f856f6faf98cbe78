"""The contract of a strategy: how one training step runs on one or many devices.

The plainest implementation, `single.py`, is the reference: whatever a strategy does, N steps from one seed must end in
the same weights as `single`, up to the order of floating-point sums.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distributed_training.config import StrategyConfig
from distributed_training.runtime.world import World


@dataclass(frozen=True)
class Place:
    """Where a strategy runs: what every one of them is made from."""

    device: torch.device
    """The device of this process."""
    world: World = field(default_factory=World)
    """This process among all of the job."""
    config: StrategyConfig = field(default_factory=StrategyConfig)
    """The `strategy` section of the config."""
    deadline: float = 300.0
    """The longest wait for other ranks, in seconds."""
    batch_size: int = 1
    """Samples of a global step: some libraries want to be told."""
    gradient_accumulation: int = 1
    """Micro-batches of a step: some libraries want to be told."""
    gpus: tuple[int, ...] = ()
    """GPUs among which this process may divide its part of a batch, that of `device` first; empty: none is chosen."""


@dataclass(frozen=True)
class StepSettings:
    """What a step does beside forward and backward."""

    precision: str = "fp32"
    """fp32, tf32, bf16, fp16 or auto."""
    gradient_clip: float | None = None
    """Largest global norm of the gradient."""
    nonfinite: str = "gradients"
    """gradients, loss or off: what decides whether a step is skipped."""
    compile: bool = False
    """Run the model through torch.compile."""
    channels_last: str = "off"
    """auto, on or off: compute 2d convolutions with their channels innermost."""
    fused: bool = True
    """Use the optimizer's fused kernel where there is one."""


class StepResult(NamedTuple):
    """What `step` did. Tensors on the device, so that nobody waits for it."""

    norm: Tensor | None
    """Global norm of the gradient before clipping, where it was computed."""
    skipped: Tensor | bool
    """True or 1 where the update was skipped because something was not finite."""


class Strategy(ABC):
    """How a step runs. Called from the training thread of every rank, each method by all ranks in the same order.

    A call that waits for other ranks ends with an error at the run's deadline, never hangs.
    """

    name: str
    exact = True
    """Whether the training is that of `single` up to the order of sums; False where something is rounded on the way."""
    divides_among_gpus = False
    """Whether a process can use several GPUs, those of `Place.gpus`."""
    capturable = False
    """Whether a whole step may be recorded as a CUDA graph: nothing in it waits for the device or for other ranks."""
    device: torch.device
    rank: int = 0
    world_size: int = 1
    counts = True
    """Set before a forward pass: False where its rows are padding, which statistics such as batch norm's leave out."""

    @abstractmethod
    def __init__(self, place: Place) -> None:
        """Join the other ranks, where there are any. A place that it cannot run in is refused by a ConfigError."""

    @abstractmethod
    def setup(self, model: nn.Module, optimizer: Optimizer | None, settings: StepSettings) -> nn.Module:
        """Take over model and optimizer; return what the forward pass calls. The optimizer may be None to evaluate."""

    @abstractmethod
    def autocast(self) -> AbstractContextManager[Any]:
        """The arithmetic of the forward pass and the loss."""

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of a micro-batch. Gradients travel between ranks only in the last one."""
        return nullcontext()

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`, weighted so that their sum over micro-batches and ranks is the step's mean."""

    @abstractmethod
    def step(self, loss: Tensor) -> StepResult:
        """Clip, update the weights and clear the gradients; or, if something is not finite, only clear them."""

    def abandon_step(self) -> None:  # noqa: B027 (only for strategies that are capturable)
        """Forget a step that was broken off somewhere between its forward pass and its update."""

    def step_state(self) -> list[Tensor]:
        """Tensors that a step changes beside weights and optimizer, such as the scale of the loss."""
        return []

    def reduce(self, value: Tensor) -> Tensor:
        """The sum of a tensor over all ranks."""
        return value

    def waiting(self, operation: str) -> AbstractContextManager[Any]:
        """Around reading from the device what other ranks have a part in: a GPU's wait for them shows only there."""
        return nullcontext()

    def gather(self, value: Tensor) -> Tensor:
        """The tensors of all ranks one after the other in rank order; their first dimensions may differ."""
        return value

    def broadcast(self, value: Tensor) -> Tensor:
        """The tensor of rank 0 on every rank, in place; of the same shape and type everywhere."""
        return value

    def gather_values(self, value: Any) -> list[Any]:
        """A small value of every rank, in rank order; anything JSON can hold."""
        if self.world_size == 1:
            return [value]
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self.device)
        lengths = self.gather(torch.tensor([len(text)], device=self.device)).tolist()
        parts = self.gather(text).cpu().split(lengths)
        return [json.loads(bytes(part.numpy())) for part in parts]

    def heed(self, told_to_stop: Callable[[], bool]) -> None:  # noqa: B027 (nobody to wait for alone)
        """How to see that a signal asked this process to stop: a wait for a rank that is gone must end then."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Weights, optimizer and scaler in the portable form: full tensors by parameter name, whatever the strategy.

        The tensors may be the live ones: the caller copies them before the next step. Only rank 0's are looked at.
        """

    @abstractmethod
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take a `state` that any strategy gave, on any number of ranks. Every rank is given the whole."""

    def barrier(self) -> None:  # noqa: B027 (nothing to wait for alone)
        """Wait until every rank is here."""

    def teardown(self) -> None:  # noqa: B027 (optional)
        """Give back process-wide settings, groups and threads. Safe to call twice."""
