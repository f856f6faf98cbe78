"""What a run says of itself after every epoch, and the end that the search may ask for in return."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed_training.training.callbacks import Callback
from distributed_training.tuning.reporting import DIRECTORY, DONE, EPOCH, SECONDS

if TYPE_CHECKING:
    from distributed_training.training.trainer import Trainer

Tell = Callable[[dict[str, Any], Path | None], str]
"""Gets metrics, and the checkpoint that belongs to them if others may go on from it; gives the reason to end, or ''."""


class Reporter(Callback):
    """Tells the metrics of each epoch. On every rank, as saving takes all of them; only rank 0 speaks."""

    def __init__(self, tell: Tell, every: int | None = None) -> None:
        """
        Args:
            tell: who is told.
            every: epochs between two checkpoints that other trials may go on from; None: no other trial ever does.
        """
        self._tell, self._every = tell, every
        self._began, self._before = time.perf_counter(), 0.0

    def on_train_start(self, trainer: Trainer) -> None:
        self._began = time.perf_counter()
        if trainer.cursor.epoch and not trainer.cursor.step and self._every is None:
            # The trial may have ended between the checkpoint and the report: told twice does no harm.
            self._say(trainer, None)

    def on_epoch_saved(self, trainer: Trainer, epoch: int) -> None:
        path = None
        if self._every is not None and ((epoch + 1) % self._every == 0 or epoch + 1 == trainer.epochs):
            trainer.save()  # written in the foreground: such trials have checkpoint.background=false
            path = self._newest(trainer)
        self._say(trainer, path)

    def state(self) -> dict[str, Any]:
        return {"seconds": self._seconds}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._before = float(state["seconds"])

    @property
    def _seconds(self) -> float:
        return self._before + time.perf_counter() - self._began

    def _say(self, trainer: Trainer, checkpoint: Path | None) -> None:
        if trainer.strategy.rank != 0:
            return
        metrics: dict[str, Any] = {name: float(value) for name, value in trainer.last_metrics.items()}
        metrics |= {EPOCH: trainer.cursor.epoch, SECONDS: self._seconds}
        if self._every is not None and trainer.cursor.epoch >= trainer.epochs:
            metrics[DONE] = True  # else it could still be told to go on from another's weights, and not train with them
        if trainer.run_directory is not None:
            metrics[DIRECTORY] = str(trainer.run_directory.path)
        reason = self._tell(metrics, checkpoint)
        if reason:
            trainer.stop(reason)

    @staticmethod
    def _newest(trainer: Trainer) -> Path | None:
        run = trainer.run_directory
        return max(run.checkpoints.glob("step-*"), default=None) if run is not None else None
