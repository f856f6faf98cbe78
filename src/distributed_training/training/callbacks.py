"""Callbacks: what happens around the loop. Early stopping is one; users write their own."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from distributed_training.config import EarlyStoppingConfig

if TYPE_CHECKING:
    from distributed_training.training.trainer import Trainer

logger = logging.getLogger(__name__)


class Callback:
    """Override what you need. Methods run in the training thread between two steps, in the order of the list.

    `trainer.stop("why")` in any of them ends the training after the current step. An exception ends it with an error.
    """

    def on_train_start(self, trainer: Trainer) -> None:
        """Model, optimizer and data are in place; a checkpoint has been loaded if there is one."""

    def on_epoch_start(self, trainer: Trainer, epoch: int) -> None:
        """Before the first step of an epoch, or the first after a resume."""

    def on_step_end(self, trainer: Trainer, step: int, loss: Tensor) -> None:
        """After each optimizer step. `loss` is on the device: reading it every step slows a GPU down."""

    def on_log(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """When training metrics were logged."""

    def on_validation_end(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """After each validation."""

    def on_epoch_end(self, trainer: Trainer, epoch: int) -> None:
        """After the last step of an epoch and its validation, before its checkpoint."""

    def on_epoch_saved(self, trainer: Trainer, epoch: int) -> None:
        """After an epoch's checkpoint, if it has one. `trainer.save()` here saves the whole epoch, on all ranks."""

    def on_train_end(self, trainer: Trainer, status: str) -> None:
        """Always called last: completed, stopped early, interrupted or failed."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint should hold of this callback."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` gave."""


class EarlyStopping(Callback):
    """Stop when a metric has not improved for `patience` validations."""

    def __init__(self, config: EarlyStoppingConfig | None = None, **settings: Any) -> None:
        self.config = config or EarlyStoppingConfig(enabled=True, **settings)
        self.best = math.inf
        self.waited = 0

    def on_validation_end(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        if self.config.monitor not in metrics:
            logger.warning("early_stopping.monitor=%s is not among %s", self.config.monitor, ", ".join(metrics))
            return
        value = metrics[self.config.monitor] * (1 if self.config.mode == "min" else -1)
        if value < self.best - self.config.min_delta:
            self.best, self.waited = value, 0
            return
        self.waited += 1
        if self.waited >= self.config.patience:
            trainer.stop(f"{self.config.monitor} has not improved for {self.waited} validations")

    def state(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.best, self.waited = state["best"], state["waited"]
