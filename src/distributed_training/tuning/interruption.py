"""A search that is told to end: by Ctrl-C, by SIGTERM of a batch system or `timeout`, by the end of a terminal."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from distributed_training.runtime.signals import handled_by
from distributed_training.tuning.records import Search

_LIKE_CTRL_C = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def ends_like_ctrl_c(search: Search) -> Iterator[None]:
    """While entered, SIGTERM and SIGHUP end a search as Ctrl-C does, and the search notes which it was.

    Ray Tune ends in order at Ctrl-C alone. To be entered when Ray is connected: connecting installs a handler that ends
    the process at SIGTERM, with a crash report.
    """

    def note(number: int, frame: FrameType | None) -> None:
        search.signal = signal.Signals(number).name
        signal.raise_signal(signal.SIGINT)

    if threading.current_thread() is not threading.main_thread():  # Python allows handlers nowhere else
        yield
        return
    with handled_by(note, _LIKE_CTRL_C):
        yield
