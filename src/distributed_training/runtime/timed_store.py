"""The store where the ranks met, with a limit on the time of every call.

torch's store waits for ever when the process that keeps it stands still. Its calls are made by a thread of their own
here, so that the caller can stop waiting.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from concurrent.futures import Future, wait
from typing import Any


class StoreLost(Exception):
    """The connection to the store broke: whoever kept it is gone."""


class StoreSilent(StoreLost):
    """The store did not answer in time: whoever keeps it stands still or cannot be reached."""


class TimedStore:
    """A few calls of torch's Store. Each raises StoreLost when the store is gone, StoreSilent past the limit."""

    def __init__(self, store: Any, limit: float, place: tuple[str, int]) -> None:
        self._store, self._limit = store, limit
        # Nobody ever writes to this connection: it is there to break. torch's own would fill the screen with what it
        # thinks of a store that is gone, each time it is asked.
        self._lifeline = socket.create_connection(place, timeout=limit)
        self._lifeline.setblocking(False)
        self._calls: queue.SimpleQueue[tuple[Future[Any], str, tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="watch-store", daemon=True)
        self._thread.start()

    def set(self, key: str, value: str, within: float | None = None) -> None:
        """Put a value; a call that asks must follow to know that it has arrived."""
        self._call("set", key, value, within=within)

    def count(self, key: str, within: float | None = None) -> int:
        """Add one to a number, which begins at 0, and get it."""
        return int(self._call("add", key, 1, within=within))

    def set_first(self, key: str, value: str, within: float | None = None) -> str:
        """Put a value unless there is one, and get the one that is there now."""
        return str(self._call("compare_set", key, "", value, within=within), "utf-8")

    def has(self, *keys: str, within: float | None = None) -> bool:
        """Whether all of these keys have values."""
        return bool(self._call("check", list(keys), within=within))

    def get(self, key: str, within: float | None = None) -> str | None:
        """The value, or None where there is none."""
        return str(self._call("get", key, within=within), "utf-8") if self.has(key, within=within) else None

    def wait_for(self, keys: list[str], seconds: float) -> bool:
        """Whether all keys have values before the time is over."""
        end = time.monotonic() + seconds
        while not self.has(*keys, within=seconds):
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        return True

    def close(self) -> None:
        """End the thread; the store itself belongs to others."""
        self._calls.put(None)
        self._thread.join(timeout=5)
        self._lifeline.close()

    def _call(self, name: str, *arguments: Any, within: float | None) -> Any:
        if self._is_cut():
            raise StoreLost("the connection is closed")
        answer: Future[Any] = Future()
        self._calls.put((answer, name, arguments))
        limit = self._limit if within is None else within
        wait([answer], limit)
        wait([answer], 1.0)  # the clock runs on while a process is stopped: only then the answer is still to be read
        if not answer.done():
            raise StoreSilent(f"no answer within {limit:g} s")
        try:
            return answer.result()
        except Exception as error:
            raise StoreLost(str(error).splitlines()[0] if str(error) else type(error).__name__) from None

    def _is_cut(self) -> bool:
        try:
            return self._lifeline.recv(1) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            answer, name, arguments = call
            try:
                answer.set_result(getattr(self._store, name)(*arguments))
            except Exception as error:
                answer.set_exception(error)
