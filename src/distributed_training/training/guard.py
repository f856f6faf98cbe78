"""Counts steps whose loss or gradient was not finite, and stops a run that only makes such steps."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from distributed_training.data.base import Batch
from distributed_training.data.nested import tensors_in
from distributed_training.runtime.errors import TrainingDivergedError
from distributed_training.strategies.base import StepResult

logger = logging.getLogger(__name__)


class NonfiniteGuard:
    """On the CPU it judges each step at once; on a GPU it counts on the device and judges when the loss is logged."""

    def __init__(self, limit: int, device: torch.device) -> None:
        self._limit = limit
        self._skipped = 0
        self._streak = 0
        self._worst = 0
        self._on_device = torch.zeros(3, device=device) if device.type != "cpu" else None

    def update(self, result: StepResult, batch: Batch, epoch: int, step: int) -> None:
        """Take note of a step."""
        skipped = result.skipped
        if self._on_device is None:  # reading a tensor costs nothing here
            skipped = bool(skipped)
        if skipped is False:
            self._streak = 0
        elif skipped is True:
            self._skipped += 1
            self._streak += 1
            culprit = _culprit(batch)
            if self._streak >= self._limit:
                raise self._error(self._streak, f"epoch {epoch}, step {step}", culprit)
            logger.warning("epoch %d, step %d skipped: loss or gradient is not finite%s", epoch, step, culprit)
        else:
            assert isinstance(skipped, Tensor)
            assert self._on_device is not None
            total, streak, worst = self._on_device.unbind()
            flag = skipped.reshape(())
            total.add_(flag)
            streak.add_(flag).mul_(flag)
            torch.maximum(worst, streak, out=worst)

    def check(self, epoch: int, step: int) -> None:
        """Read the counts of the device; called when the loss is read anyway."""
        if self._on_device is None:
            return
        total, _, worst = (int(v) for v in self._on_device.tolist())
        if total > self._skipped:
            logger.warning("%d steps skipped up to epoch %d, step %d: not finite", total - self._skipped, epoch, step)
            self._skipped = total
        if worst >= self._limit:
            raise self._error(worst, f"epoch {epoch}, up to step {step}", "")

    @property
    def skipped(self) -> int:
        """Steps skipped so far, as far as it is known."""
        return self._skipped

    def _error(self, streak: int, where: str, culprit: str) -> TrainingDivergedError:
        return TrainingDivergedError(
            f"loss or gradient was not finite in {streak} steps in a row ({where}){culprit}; the weights are those of "
            "the last finite step. Lower training.lr, set training.gradient_clip, or try another training.precision"
        )


def _culprit(batch: Batch) -> str:
    """Which samples of the batch hold NaN or infinity themselves, if any."""
    for tensor in tensors_in(batch.data):
        if tensor.is_floating_point() and tensor.ndim and len(tensor) == batch.size:
            bad = (~torch.isfinite(tensor.reshape(batch.size, -1))).any(1).nonzero().flatten().tolist()
            if bad:
                names = ", ".join(str(batch.ids[row]) for row in bad[:5])
                return f"; the inputs of sample {names} are not finite"
    return ""
