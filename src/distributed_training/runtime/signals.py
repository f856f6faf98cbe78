"""Ctrl-C and SIGTERM as a wish to stop at the next step, not as an exception in the middle of one."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

_STOPPING = (signal.SIGINT, signal.SIGTERM)
_ECHO = 2.0  # seconds


class StopSignals:
    """While entered, the first SIGINT or SIGTERM only sets `received`; a second one acts as it always did.

    `repeated`: a launcher passes on what the terminal has sent to all processes already, so that what comes right after
    the first is no second wish.
    """

    def __init__(self, repeated: bool = False) -> None:
        self._repeated, self._first = repeated, 0.0
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            self._previous = {number: signal.signal(number, self._note) for number in _STOPPING}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self._first = signal.Signals(number), time.monotonic()
            if not self._repeated:
                self.__exit__()
        elif time.monotonic() - self._first > _ECHO:
            self.__exit__()
            signal.raise_signal(signal.Signals(number))
