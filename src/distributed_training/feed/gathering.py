"""Rows put together by several threads: one core alone seldom has all the bandwidth of a machine's memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from itertools import pairwise

import numpy as np

from distributed_training.feed.rows import Loose, Rows

_LARGE = 1 << 20  # bytes that are worth the message to another thread
_MOST = 3


class Helpers:
    """Threads that gather parts of a buffer beside the thread that asks. They start when they are first needed."""

    def __init__(self, cores: int) -> None:
        self._count = min(_MOST, cores - 1)
        self._pool = ThreadPoolExecutor(max(1, self._count), "gather")

    def gather(self, buffer: Rows | Loose, memory: np.ndarray) -> None:
        """What `buffer.gather` does, with help where there is much to copy."""
        rows = len(buffer) // buffer.width if buffer.width else 0
        if len(buffer) < _LARGE or rows <= self._count:
            buffer.gather(memory)
            return
        bounds = [rows * part // (self._count + 1) for part in range(self._count + 2)]
        (own, place), *others = [
            (buffer.part(first, last), memory[first * buffer.width : last * buffer.width])
            for first, last in pairwise(bounds)
        ]
        helped = [self._pool.submit(part.gather, there) for part, there in others]
        try:
            own.gather(place)
        finally:  # without a deadline: a copy in memory ends, and to go on before would be to send what is not there
            wait(helped)
        for one in helped:
            one.result()

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False)
