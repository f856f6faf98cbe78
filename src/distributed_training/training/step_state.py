"""What a step changes: to be copied, put back and compared, so that one step can be run in two ways."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distributed_training.strategies.base import Strategy

Value = TypeVar("Value")
Tensors = dict[str, list[Tensor]]
WEIGHTS = "weights"


class StepState:
    """Weights, buffers, the state of the optimizer and of the strategy, and the generator of a GPU."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, strategy: Strategy) -> None:
        self._model, self._optimizer, self._strategy = model, optimizer, strategy

    @property
    def now(self) -> Tensors:
        """All of it as it is now by kind, not copied."""
        found: Tensors = {WEIGHTS: list(self._model.parameters()), "buffers": list(self._model.buffers())}
        for state in self._optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    found.setdefault(f"optimizer {name}", []).append(value)
        found["strategy"] = self._strategy.step_state()
        return {kind: [tensor.detach() for tensor in tensors] for kind, tensors in found.items()}

    @property
    def follows_gradients(self) -> list[str]:
        """The kind that a step changes in proportion to the gradients. Adam's weights do not: their updates are of one
        size for large and small gradients, so that rounding alone turns many of them around."""
        return ["optimizer exp_avg"] if "optimizer exp_avg" in self.now else [WEIGHTS]

    def copy(self) -> Copy:
        """As it is now."""
        copied = {kind: [tensor.clone() for tensor in tensors] for kind, tensors in self.now.items()}
        return Copy(copied, torch.cuda.get_rng_state(self._strategy.device))

    def restore(self, copy: Copy) -> None:
        """As it was."""
        for kind, tensors in self.now.items():
            for tensor, value in zip(tensors, copy.tensors[kind]):
                tensor.copy_(value)
        torch.cuda.set_rng_state(copy.generator, self._strategy.device)

    def timed(self, function: Callable[[], Value]) -> tuple[Value, float]:
        """What a function gives, and the seconds until the device is done with it."""
        torch.cuda.synchronize(self._strategy.device)
        began = time.perf_counter()
        value = function()
        torch.cuda.synchronize(self._strategy.device)
        return value, time.perf_counter() - began


class Copy:
    """The state at one time."""

    def __init__(self, tensors: Tensors, generator: Tensor) -> None:
        self.tensors, self.generator = tensors, generator

    def distance(self, other: Copy, before: Copy, kinds: Sequence[str] = ()) -> float:
        """How far this is from another state, in lengths of the other's way from `before`, for the kind that is
        farthest (of those named, or of all); 0 for equal bits."""
        farthest = 0.0
        for kind, there in other.tensors.items():
            here = self.tensors[kind]
            if kinds and kind not in kinds:
                continue
            if all(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in zip(here, there)):
                continue
            off = _length(here, there) / max(_length(there, before.tensors[kind]), 1e-30)
            farthest = max(farthest, off if math.isfinite(off) else math.inf)
        return farthest


def _length(some: list[Tensor], others: list[Tensor]) -> float:
    """Length of the difference."""
    pairs = [(a.double().nan_to_num(), b.double().nan_to_num()) for a, b in zip(some, others) if a.is_floating_point()]
    squares = [(a - b).square().sum() for a, b in pairs]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0
