"""Ctrl-C and SIGTERM as a wish to stop at the next step, not as an exception in the middle of one."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

_STOPPING = (signal.SIGINT, signal.SIGTERM)
ENDING = (*_STOPPING, signal.SIGHUP)
"""What asks a launcher to end its job."""
_ECHO = 2.0  # seconds
_SET_PARENT_DEATH_SIGNAL = 1  # of prctl(2)


@contextmanager
def handled_by(note: Callable[[int, FrameType | None], None], numbers: Iterable[signal.Signals]) -> Iterator[None]:
    """While entered, `note` gets these signals; then they do what they did before."""
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def interrupting(*numbers: signal.Signals) -> Iterator[None]:
    """While entered, these signals are Ctrl-C: what was started is ended on the way out. Only in the main thread."""
    if threading.current_thread() is not threading.main_thread():  # Python allows handlers nowhere else
        yield
        return
    with handled_by(_interrupt, numbers):
        yield


@contextmanager
def held_back() -> Iterator[None]:
    """A Ctrl-C or SIGTERM that comes inside acts at the end: for what must not be left half done.

    An interrupt while a process is being started would leave one behind that nobody knows of.
    """
    if threading.current_thread() is not threading.main_thread():  # signals come only there
        yield
        return
    came: list[int] = []
    with handled_by(lambda number, frame: came.append(number), _STOPPING):
        yield
    for number in came:
        signal.raise_signal(signal.Signals(number))


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


class StopSignals:
    """While entered, the first SIGINT or SIGTERM only sets `received`; a second one acts as it always did.

    `repeated`: a launcher passes on what the terminal has sent to all processes already, so that what comes right after
    the first is no second wish.
    """

    def __init__(self, repeated: bool = False) -> None:
        self._repeated, self._first = repeated, 0.0
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}
        self._arrivals: tuple[int, int] | None = None
        self._arrived = False

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            self._previous = {number: signal.signal(number, self._note) for number in _STOPPING}
            self._arrivals = os.pipe()
            for end in self._arrivals:
                os.set_blocking(end, False)
            self._previous_arrivals = signal.set_wakeup_fd(self._arrivals[1], warn_on_full_buffer=False)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
        if self._arrivals is not None:
            signal.set_wakeup_fd(self._previous_arrivals)
            arrivals, self._arrivals = self._arrivals, None
            for end in arrivals:
                os.close(end)

    @property
    def arrived(self) -> bool:
        """Whether a signal has come, even if `received` is not set: that has to wait until the main thread runs Python
        code again. For other threads."""
        if self.received is None and not self._arrived and self._arrivals is not None:
            with suppress(BlockingIOError, OSError):
                numbers = os.read(self._arrivals[0], 4096)  # of all signals that have handlers
                self._arrived = any(number in numbers for number in _STOPPING)
        return self._arrived or self.received is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self._first = signal.Signals(number), time.monotonic()
            if not self._repeated:
                self.__exit__()
        elif time.monotonic() - self._first > _ECHO:
            self.__exit__()
            signal.raise_signal(signal.Signals(number))


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Have the system send this process a signal when its parent is gone, even after kill -9. Linux only.

    The parent is the thread that made this process: one that ends before its process counts as gone, too.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, int(number))
