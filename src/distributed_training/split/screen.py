"""What a person sees of a feed: the loader's bar, and at the end what held the training up."""

from __future__ import annotations

import sys
import time
from typing import Any

from distributed_training.feed.figures import Figures
from distributed_training.feed.forecast import Forecast
from distributed_training.feed.loader import LoaderFigures
from distributed_training.split.expected import say
from distributed_training.training.notebook import Area, bar
from distributed_training.training.progress import console, kind_of_display

_LINE_EVERY, _RATES_EVERY = 10.0, 1.0  # seconds
_BUSY = 0.7


def summary(figures: Figures, ranks: int = 1) -> list[str]:
    """Lines for the end of a training: how the feed (of rank 0) did, what was the bottleneck, what to change."""
    rates = f"{figures.samples_per_second:,.0f}/s, {figures.megabytes_per_second:,.1f} MB/s"
    waited = f"training waited {figures.wait_share:.1%} of the time"
    whose = f" of rank 0 of {ranks}" if ranks > 1 else ""
    lines = [f"  feed               {figures.samples:,} samples{whose} at {rates}; {waited}"]
    lines.append(f"  bottleneck         {figures.bottleneck()}")
    if figures.cached:
        lines.append(f"  cache              {figures.cached:,} of {figures.steps:,} steps needed no transfer")
    if figures.reissued or figures.duplicates:
        twice = f"{figures.duplicates} that came twice were used once"
        lines.append(f"  made good          {figures.reissued} steps were lent again, {twice}")
    return lines


class LoaderScreen:
    """Shows what a loader does: a bar on a terminal or in a notebook, a line now and then elsewhere."""

    def __init__(self, kind: str, steps: int, samples: float, workers: int, epochs: int | None = None) -> None:
        """
        Args:
            kind: as `run.progress`: auto, bar, plain or off.
            steps: training steps in an epoch.
            samples: of one batch as it is sent.
            workers: processes that load.
            epochs: how many will be trained, if that is known.
        """
        self._kind = kind_of_display(kind)
        self._area = Area()
        self._steps, self._samples, self._workers, self._epochs = steps, samples, workers, epochs
        self._forecast = Forecast(max(1, steps), round(steps * samples))
        self._all = f"{workers} worker{'s' if workers > 1 else ''}"
        self._began = self._shown = time.monotonic()
        self._batches = self._bytes = 0
        self._rates = ""
        self._bar: Any = None

    def __call__(self, figures: LoaderFigures) -> None:
        """Show figures; called about twice a second."""
        every = _LINE_EVERY if self._kind == "plain" else _RATES_EVERY
        due = time.monotonic() - self._shown >= every
        trained = figures.epoch * self._steps + min(figures.step, self._steps)
        if (line := self._forecast.look(time.monotonic(), trained, figures.bytes)) is not None:
            say(line, self._kind)
        if due:
            self._measure(figures)
        if self._kind == "bar":
            self._draw(figures)
        elif self._kind == "notebook" and self._area.due:
            self._area.show(
                bar(
                    min(figures.step, self._steps), self._steps, f"loading, epoch {self._epoch(figures)}  {self._rates}"
                )
            )
        elif self._kind == "plain" and due:
            self._say(f"epoch {figures.epoch + 1}  step {figures.step}  {self._rates}")

    def close(self, figures: LoaderFigures) -> None:
        """The loader has ended: say what it did."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if self._kind == "off":
            return
        seconds = time.monotonic() - self._began
        busy = min(1.0, figures.loading / max(seconds * self._workers, 1e-9))
        advice = "; more of them, or a cheaper dataset, would help a training that waits" if busy > _BUSY else ""
        self._say(
            f"loaded {figures.batches:,} batches, {figures.bytes / 1e6:,.1f} MB in {seconds:.1f} s; "
            f"{self._all} spent {busy:.0%} of it on loading{advice}"
        )

    def _say(self, line: str) -> None:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()

    def _measure(self, figures: LoaderFigures) -> None:
        now = time.monotonic()
        seconds, self._shown = now - self._shown, now
        batches, size = figures.batches - self._batches, figures.bytes - self._bytes
        self._batches, self._bytes = figures.batches, figures.bytes
        self._rates = (
            f"{batches * self._samples / seconds:,.0f} samples/s  {size / 1e6 / seconds:,.1f} MB/s  "
            f"{figures.connected} of {self._all} connected  GPU side: {figures.queue} ready, waits "
            f"{figures.waited:.0%}, loaders {figures.loaders}"
        )

    def _draw(self, figures: LoaderFigures) -> None:
        if self._bar is None:
            from rich.progress import BarColumn, Progress, TextColumn

            columns = (TextColumn("[bold]loading, epoch {task.fields[epoch]}"), BarColumn())
            self._bar = Progress(*columns, TextColumn("{task.fields[figures]}"), console=console())
            self._task = self._bar.add_task("", total=self._steps, epoch="", figures="")
            self._bar.start()
        step, epoch = min(figures.step, self._steps), self._epoch(figures)
        self._bar.update(self._task, completed=step, epoch=epoch, figures=self._rates)

    def _epoch(self, figures: LoaderFigures) -> str:
        return f"{figures.epoch + 1}/{self._epochs}" if self._epochs else f"{figures.epoch + 1}"
