"""What a person sees of a validation or inference: a bar while it runs, at the end what held it up."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from distributed_training.training.notebook import Area, bar
from distributed_training.training.progress import console, kind_of_display

OnProgress = Callable[[int, int], None]
"""Called with (samples done, samples in all)."""

_LINE_EVERY = 10.0
_FEW = 0.1  # part of the time that is not worth a word


@contextmanager
def sample_progress(kind: str) -> Iterator[OnProgress | None]:
    """As `run.progress`: a bar on a terminal or in a notebook, a line now and then elsewhere, or nothing."""
    kind = kind_of_display(kind)
    if kind == "bar":
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        rate = TextColumn("{task.fields[rate]} samples/s")
        with Progress(BarColumn(), MofNCompleteColumn(), rate, TimeRemainingColumn(), console=console()) as bar:
            task, start = bar.add_task("", total=None, rate="0"), time.monotonic()

            def draw(done: int, total: int) -> None:
                rate = done / max(time.monotonic() - start, 1e-9)
                bar.update(task, completed=done, total=total, rate=f"{rate:,.0f}")

            yield draw
    elif kind == "notebook":
        yield _Notebook()
    elif kind == "plain":
        yield _Lines()
    else:
        yield None


class _Notebook:
    """A bar below the cell."""

    def __init__(self) -> None:
        self._area, self._start = Area(), time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if self._area.due or done == total:
            rate = done / max(time.monotonic() - self._start, 1e-9)
            self._area.show(bar(done, total, f"{done:,} of {total:,} samples  {rate:,.0f} samples/s"))


class _Lines:
    """A line every ten seconds."""

    def __init__(self) -> None:
        self._start = self._said = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._said > _LINE_EVERY:
            self._said = now
            sys.stderr.write(f"{done:,} of {total:,} samples  {done / (now - self._start):,.0f} samples/s\n")
            sys.stderr.flush()


def bottleneck(seconds: Mapping[str, float], total: float) -> str:
    """In words: what the CPU side spent its time on, and what to change. `seconds` are those of a `Client`."""
    share = {name: value / max(total, 1e-9) for name, value in seconds.items()}
    name = max(share, key=lambda name: share[name])
    if share[name] < _FEW:
        return "nothing: most of the time went into connecting"
    advice = {
        "loading": "loading: this side was busy with it for {:.0%} of the time; take more loader processes "
        "(num_workers), or make the dataset cheaper",
        "network": "the network: this side waited for {:.0%} of the time until the link took what was loaded; send "
        "smaller types (uint8 instead of float32), or come nearer",
        "gpu": "the GPU side: this side waited for its answers for {:.0%} of the time; larger batches may help, and "
        "other clients share the model",
    }
    return advice[name].format(share[name])
