"""The learning rate as a function of the step: warm-up, then cosine, linear, step or constant. Nothing to save."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer


def _cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))


def _linear(progress: float) -> float:
    return 1 - progress


def _step(progress: float) -> float:
    return 0.1 ** min(int(progress * 3), 2)


def _constant(progress: float) -> float:
    return 1.0


SHAPES: dict[str, Callable[[float], float]] = {
    "cosine": _cosine,
    "linear": _linear,
    "step": _step,
    "constant": _constant,
}


class Schedule:
    """Sets an optimizer's learning rates for a point of the run. Each group keeps its share of its own peak rate."""

    def __init__(self, optimizer: Optimizer, shape: str, epochs: int, warmup_epochs: float) -> None:
        self._optimizer = optimizer  # not its groups: loading a state replaces them
        self._peaks = [float(group["lr"]) for group in optimizer.param_groups]
        self._shape, self._epochs, self._warmup = SHAPES[shape], epochs, warmup_epochs
        self._fixed = shape == "constant" and warmup_epochs == 0

    def factor(self, epoch: float) -> float:
        """Share of the peak rate at a fractional epoch."""
        if epoch < self._warmup:
            return epoch / self._warmup
        length = self._epochs - self._warmup
        return self._shape(min((epoch - self._warmup) / length, 1.0) if length > 0 else 0.0)

    def apply(self, epoch: int, step: int, steps: int | None) -> None:
        """Set the rates for a step. The first step of a warm-up has one step's share, not zero."""
        if self._fixed:
            return
        if steps:
            at = epoch + (step + (1 if epoch + step / steps < self._warmup else 0)) / steps
        else:
            at = float(epoch + (1 if epoch < self._warmup else 0))
        factor = self.factor(min(at, self._epochs))
        for group, peak in zip(self._optimizer.param_groups, self._peaks):
            group["lr"] = peak * factor

    def reset(self) -> None:
        """Put the peak rates back, for the next training with the same optimizer to start from."""
        if not self._fixed:  # a rate that this schedule never touched is none of its business
            self.set_peaks()

    def set_peaks(self) -> None:
        """Set every group to its peak rate."""
        for group, peak in zip(self._optimizer.param_groups, self._peaks):
            group["lr"] = peak

    @property
    def lr(self) -> float:
        """The rate of the first group now."""
        return float(self._optimizer.param_groups[0]["lr"])
