"""Rows put together by several threads: one core alone seldom has all the bandwidth of a machine's memory."""

from __future__ import annotations

import queue
import threading
from itertools import pairwise

import numpy as np

from distributed_training.feed.rows import Loose, Rows

_LARGE = 1 << 20  # bytes that are worth the message to another thread
_MOST = 3

_Part = tuple[Rows | Loose, np.ndarray]


class Helpers:
    """Threads that gather parts of a buffer beside the thread that asks. They start when they are first needed."""

    def __init__(self, cores: int) -> None:
        self._count = min(_MOST, cores - 1)
        self._parts: queue.SimpleQueue[_Part | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def gather(self, buffer: Rows | Loose, memory: np.ndarray) -> None:
        """What `buffer.gather` does, with help where there is much to copy."""
        rows = len(buffer) // buffer.width if buffer.width else 0
        if len(buffer) < _LARGE or rows <= self._count:
            buffer.gather(memory)
            return
        self._start()
        bounds = [rows * part // (self._count + 1) for part in range(self._count + 2)]
        parts = [
            (buffer.part(first, last), memory[first * buffer.width : last * buffer.width])
            for first, last in pairwise(bounds)
        ]
        for part in parts[1:]:
            self._parts.put(part)
        errors: list[Exception | None] = []
        try:
            parts[0][0].gather(parts[0][1])
        finally:  # without a deadline: a copy in memory ends, and to go on before would be to send what is not there
            errors += [self._done.get() for _ in parts[1:]]
        for error in errors:
            if error is not None:
                raise error

    def close(self) -> None:
        """End the threads."""
        for _ in self._threads:
            self._parts.put(None)
        self._threads = []

    def _start(self) -> None:
        while len(self._threads) < self._count:
            thread = threading.Thread(target=self._run, name="gather", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _run(self) -> None:
        while (part := self._parts.get()) is not None:
            try:
                part[0].gather(part[1])
                self._done.put(None)
            except Exception as error:
                self._done.put(error)
            part = None  # else the samples would live until the next one comes
