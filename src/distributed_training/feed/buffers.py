"""Memory that batches are received into: reused, so that it is paid for once, and pinned where a GPU will read it.

What is given out is a memoryview. When the last tensor that looks at it is gone, the memory comes back by itself:
nobody who keeps a batch can ever see it overwritten.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from distributed_training.data.ahead import may_be_read

_ALIGNMENT = 64
_SMALLEST = 16 << 10
_PIECES = 8  # sizes between two powers of two: at most an eighth of a block is unused


class BufferPool:
    """Blocks by size. Keeps at most `keep` bytes that nobody uses; any thread may call it."""

    def __init__(self, keep: int, *, pinned: bool = False) -> None:
        self.keep, self.pinned = keep, pinned
        self.free_bytes = 0
        self.used_bytes = 0
        self._free: dict[int, list[np.ndarray]] = {}
        self._lent: dict[int, Any] = {}
        # A block comes back wherever its last tensor happens to be freed, even inside of a call of ours.
        self._lock = threading.RLock()
        self._events: list[tuple[Any, np.ndarray]] = []

    def allocate(self, size: int, kind: Any = None, stream: int = 0) -> memoryview:
        """Memory of `size` bytes that begins at a multiple of 64 (the form of allocator that `wire` takes)."""
        room = block_size(size)
        with self._lock:
            if self._events:
                self._collect()
            blocks = self._free.get(room)
            block = blocks.pop() if blocks else None
            self.used_bytes += room
            if block is not None:
                self.free_bytes -= room
        if block is None:
            block = self._make(room)
        lent = own_array(block.data[:size])  # its end is the sign that nobody looks at the block any more
        key = id(lent)
        self._lent[key] = weakref.ref(lent, self._giver_back(key, block))
        return lent.data

    def _giver_back(self, key: int, block: np.ndarray) -> Callable[[Any], None]:
        def give_back(_: Any) -> None:
            self._lent.pop(key, None)
            self._returned(block)

        return give_back

    def _returned(self, block: np.ndarray) -> None:
        with self._lock:
            self.used_bytes -= len(block)
            if self.pinned and may_be_read():
                event = torch.cuda.Event()
                event.record()
                self._events.append((event, block))
            else:
                self._keep(block)

    def _keep(self, block: np.ndarray) -> None:
        if self.free_bytes + len(block) <= self.keep:
            self.free_bytes += len(block)
            self._free.setdefault(len(block), []).append(block)

    def _collect(self) -> None:
        busy = []
        for event, block in self._events:
            if event.query():
                self._keep(block)
            else:
                busy.append((event, block))
        self._events = busy

    def _make(self, room: int) -> np.ndarray:
        if self.pinned:
            return torch.empty(room, dtype=torch.uint8, pin_memory=True).numpy()
        raw = np.empty(room + _ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % _ALIGNMENT
        return raw[start : start + room]

    def close(self) -> None:
        """Free what is not in use."""
        with self._lock:
            self.keep = 0
            self.free_bytes = 0
            self._free.clear()
            self._events.clear()


def own_array(memory: memoryview) -> np.ndarray:
    """An array that lives as long as anything that was made of it.

    NumPy lets an array keep only the last array below it alive and forgets those between. It stops at what is no array:
    so this one stands on a memoryview, and every array, memoryview and tensor made of it keeps this very array.
    """
    array = np.frombuffer(memory, np.uint8)
    assert not isinstance(array.base, np.ndarray)
    return array


def block_size(size: int) -> int:
    """The size of block that `size` bytes are taken from."""
    if size <= _SMALLEST:
        return _SMALLEST
    piece = 1 << max((size - 1).bit_length() - 4, 0)
    piece = max(piece, _SMALLEST // _PIECES)
    return -(-size // piece) * piece
