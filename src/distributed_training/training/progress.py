"""What a person sees while training: bars on a terminal or in a notebook, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from distributed_training.training.callbacks import Callback
from distributed_training.training.notebook import Area, bar, in_notebook, line

if TYPE_CHECKING:
    from distributed_training.training.trainer import Trainer

_REFRESH = 0.1
_LINE_EVERY = 10.0


def make_progress(kind: str) -> Callback | None:
    """The display for `run.progress`."""
    shown: dict[str, type[Callback]] = {"bar": BarProgress, "notebook": NotebookProgress, "plain": PlainProgress}
    kind = kind_of_display(kind)
    return shown[kind]() if kind != "off" else None


def kind_of_display(kind: str) -> str:
    """`run.progress` as bar, notebook, plain or off: auto takes bars on a terminal or in a notebook."""
    if kind in ("auto", "bar") and in_notebook():
        return "notebook"
    return ("bar" if sys.stderr.isatty() else "plain") if kind == "auto" else kind


class Watch:
    """Rates and remaining time since training (re)started."""

    def __init__(self, trainer: Trainer) -> None:
        self._start, self._first_step = time.perf_counter(), trainer.cursor.global_step

    def remaining(self, trainer: Trainer) -> str:
        """Time to the end of the last epoch, h:mm:ss."""
        done, total = trainer.cursor.global_step - self._first_step, trainer.total_steps
        if total is None or done == 0:
            return "-:--:--"
        seconds = (time.perf_counter() - self._start) / done * (total - trainer.cursor.global_step)
        minutes, seconds = divmod(int(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02d}:{seconds:02d}"


class PlainProgress(Callback):
    """A line an epoch, and one every ten seconds in long ones."""

    def on_train_start(self, trainer: Trainer) -> None:
        self._watch, self._last = Watch(trainer), time.perf_counter()
        self._metrics: dict[str, float] = {}

    def on_log(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        self._metrics |= metrics
        if time.perf_counter() - self._last > _LINE_EVERY:
            self._print(trainer, f"step {trainer.cursor.global_step}")

    def on_epoch_end(self, trainer: Trainer, epoch: int) -> None:
        self._metrics |= trainer.last_metrics
        self._print(trainer, f"epoch {epoch + 1}/{trainer.epochs}")

    def _print(self, trainer: Trainer, where: str) -> None:
        self._last = time.perf_counter()
        sys.stderr.write(f"{where}  {figures(self._metrics)}  ETA {self._watch.remaining(trainer)}\n")
        sys.stderr.flush()


class BarProgress(Callback):
    """One bar for the run, with loss, samples/s and the time left; a line stays for each epoch."""

    def __init__(self) -> None:
        self._bar: Any = None

    def on_train_start(self, trainer: Trainer) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._watch, self._next = Watch(trainer), 0.0
        self._metrics: dict[str, float] = {}
        self._bar = Progress(
            TextColumn("[bold]epoch {task.fields[epoch]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TextColumn("ETA {task.fields[eta]}"),
            console=console(),
        )
        self._task = self._bar.add_task("", total=trainer.total_steps, epoch="", figures="", eta="")
        self._bar.start()

    def on_step_end(self, trainer: Trainer, step: int, loss: Tensor) -> None:
        now = time.perf_counter()
        if now >= self._next:
            self._next = now + _REFRESH
            self._update(trainer)

    def on_log(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        self._metrics |= metrics

    def on_epoch_end(self, trainer: Trainer, epoch: int) -> None:
        self._metrics |= trainer.last_metrics
        self._bar.console.print(f"epoch {epoch + 1}/{trainer.epochs}  {figures(self._metrics)}", highlight=False)
        self._update(trainer)

    def on_train_end(self, trainer: Trainer, status: str) -> None:
        if self._bar is not None:
            self._update(trainer)
            self._bar.stop()
            self._bar = None

    def _update(self, trainer: Trainer) -> None:
        self._bar.update(
            self._task,
            completed=trainer.cursor.global_step,
            epoch=f"{min(trainer.cursor.epoch + 1, trainer.epochs)}/{trainer.epochs}",
            figures=figures(self._metrics),
            eta=self._watch.remaining(trainer),
        )


class NotebookProgress(Callback):
    """A bar for the run with loss, samples/s and the time left; a row stays for each epoch."""

    def __init__(self) -> None:
        self._area: Area | None = None

    def on_train_start(self, trainer: Trainer) -> None:
        self._area, self._watch = Area(), Watch(trainer)
        self._metrics: dict[str, float] = {}
        self._rows: list[str] = []
        self._draw(trainer)

    def on_step_end(self, trainer: Trainer, step: int, loss: Tensor) -> None:
        if self._area is not None and self._area.due:
            self._draw(trainer)

    def on_log(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        self._metrics |= metrics

    def on_epoch_end(self, trainer: Trainer, epoch: int) -> None:
        self._metrics |= trainer.last_metrics
        self._rows.append(f"epoch {epoch + 1}/{trainer.epochs}  {figures(self._metrics)}")
        self._draw(trainer)

    def on_train_end(self, trainer: Trainer, status: str) -> None:
        if self._area is not None:
            self._draw(trainer, status)
            self._area = None

    def _draw(self, trainer: Trainer, status: str = "") -> None:
        assert self._area is not None
        step, total = trainer.cursor.global_step, trainer.total_steps
        of = f"/{total}" if total is not None else ""
        end = status or f"ETA {self._watch.remaining(trainer)}"
        rows = "".join(map(line, self._rows))
        self._area.show(rows + bar(step, total, f"step {step}{of}  {figures(self._metrics)}  {end}"))


def figures(metrics: Mapping[str, float]) -> str:
    """`loss 0.1234  val_accuracy 0.9876  12,345 samples/s` from logged metrics; of a feed also how it does."""
    parts = [f"loss {metrics['train_loss']:.4f}"] if "train_loss" in metrics else []
    parts += [f"{name} {value:.4f}" for name, value in metrics.items() if name.startswith("val_")]
    if "samples_per_second" in metrics:
        parts.append(f"{metrics['samples_per_second']:,.0f} samples/s")
    if "feed_loaders" in metrics:
        parts.append(
            f"{metrics['feed_megabytes_per_second']:,.1f} MB/s  {metrics['feed_queue']:.0f} ready  "
            f"waits {metrics['feed_wait_share']:.0%}  loaders {metrics['feed_loaders']:.0f}"
        )
    return "  ".join(parts)


def console() -> Any:
    """The one console on standard error, so that log lines and bars do not overwrite each other."""
    global _console
    if _console is None:
        from rich.console import Console

        _console = Console(stderr=True)
    return _console


_console: Any = None
