"""How long an epoch will take, said by the GPU side of a feed once it can be known."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from torch import Tensor

from distributed_training.feed.forecast import Forecast
from distributed_training.feed.source import FeedSource
from distributed_training.training import Callback
from distributed_training.training.progress import console, kind_of_display

if TYPE_CHECKING:
    from distributed_training.training import Trainer

_EVERY = 0.5  # seconds between two looks


class ExpectedTime(Callback):
    """One line after the first batches, another one when the time changes much."""

    def __init__(self, source: FeedSource) -> None:
        self._source = source
        self._forecast: Forecast | None = None
        self._next = 0.0

    def on_epoch_start(self, trainer: Trainer, epoch: int) -> None:
        if self._forecast is None:
            plan = self._source.plan
            self._forecast = Forecast(plan.steps_per_epoch, plan.samples)
        self._forecast.pause()  # validation and checkpoints are not part of it

    def on_step_end(self, trainer: Trainer, step: int, loss: Tensor) -> None:
        now = time.monotonic()
        if now < self._next or self._forecast is None:
            return
        self._next = now + _EVERY
        figures = self._source.figures()
        line = self._forecast.look(now, trainer.cursor.global_step, figures.bytes, figures.waited)
        if line is not None:
            say(line, trainer.config.run.progress)


def say(line: str, progress: str) -> None:
    """A line that does not disturb the bar, if one is shown (`run.progress`)."""
    kind = kind_of_display(progress)
    if kind == "bar":
        console().print(line, highlight=False)
    elif kind != "off":
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
