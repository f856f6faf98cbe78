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


_WAITING = 1024


class NonfiniteGuard:
    """On the CPU it judges each step at once; a GPU's flags wait on the device and are judged when the loss is read."""

    def __init__(self, limit: int, device: torch.device, speaks: bool = True) -> None:
        """`speaks`: warn of every skipped step; otherwise only of one whose culprit is among this rank's samples."""
        self._limit, self._speaks = limit, speaks
        self._skipped = 0
        self._streak = 0
        self._deferred = device.type != "cpu"
        self._waiting: list[tuple[Tensor, int, int]] = []

    def update(self, result: StepResult, batch: Batch, epoch: int, step: int) -> None:
        """Take note of a step."""
        skipped = result.skipped
        if skipped is False:
            self._streak = 0
        elif self._deferred and isinstance(skipped, Tensor):
            self._waiting.append((skipped, epoch, step))
            if len(self._waiting) >= _WAITING:
                self.check()
        else:
            self._judge(bool(skipped), epoch, step, batch)

    def check(self) -> None:
        """Read the flags that wait on the device; called when the loss is read anyway."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        flags = torch.stack([flag.reshape(()) for flag, _, _ in waiting]).tolist()
        for flag, (_, epoch, step) in zip(flags, waiting):
            self._judge(bool(flag), epoch, step, None)

    def _judge(self, skipped: bool, epoch: int, step: int, batch: Batch | None) -> None:
        if not skipped:
            self._streak = 0
            return
        self._skipped += 1
        self._streak += 1
        culprit = _culprit(batch) if batch is not None else ""
        if self._streak >= self._limit:
            raise TrainingDivergedError(
                f"loss or gradient was not finite in {self._streak} steps in a row (epoch {epoch}, step {step})"
                f"{culprit}; the weights are those of the last finite step. "
                "Lower training.lr, set training.gradient_clip, or try another training.precision"
            )
        if self._speaks or culprit:
            logger.warning("epoch %d, step %d skipped: loss or gradient is not finite%s", epoch, step, culprit)

    @property
    def skipped(self) -> int:
        """Steps skipped so far, as far as it is known."""
        return self._skipped


def _culprit(batch: Batch) -> str:
    """Which samples of the batch hold NaN or infinity themselves, if any."""
    for tensor in tensors_in(batch.data):
        if tensor.is_floating_point() and tensor.ndim and len(tensor) == batch.rows:
            bad = (~torch.isfinite(tensor.reshape(batch.rows, -1))).any(1).nonzero().flatten().tolist()
            if bad:
                names = ", ".join(str(batch.ids[row]) for row in bad[:5])
                return f"; the inputs of sample {names} are not finite"
    return ""
