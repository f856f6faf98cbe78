"""Ctrl-C and SIGTERM as a wish to stop at the next step, not as an exception in the middle of one."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

_STOPPING = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """While entered, the first SIGINT or SIGTERM only sets `received`; a second one acts as it always did."""

    def __init__(self) -> None:
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
        self.received = signal.Signals(number)
        self.__exit__()
