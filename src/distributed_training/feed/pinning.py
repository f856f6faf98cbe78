"""Shared memory that a GPU copies from directly: its pages are locked, so that a copy neither stops over nor waits.

Slots are pinned one by one when the first batch lies in them: those that are never used take no memory.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import numpy as np
import torch

from distributed_training.data.ahead import may_be_read

_PORTABLE = 1  # cudaHostRegisterPortable: for every GPU of this process
_WORTH = 256 << 10  # bytes of a slot: smaller copies gain nothing


class PinnedSlots:
    """Slots of mapped segments. A slot that was let go is free once the copies are done that may be reading it."""

    def __init__(self) -> None:
        self._pinned: set[int] = set()
        self._reading: list[tuple[torch.cuda.Event, np.ndarray]] = []
        self._refused = not torch.cuda.is_available()
        # A slot comes back wherever its last tensor happens to be freed, even inside of a call of ours.
        self._lock = threading.RLock()

    def pin(self, segment: np.ndarray, begin: int, size: int) -> bool:
        """Pin a slot of a segment, as long as the segment is mapped. Whether it is."""
        if self._refused or size < _WORTH:
            return False
        address = segment.ctypes.data + begin
        if address in self._pinned:
            return True
        device = _gpu_in_use()
        if device is None:
            return False
        with torch.cuda.device(device):
            self._refused = int(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE)) != 0
        if self._refused:  # it is only slower without
            return False
        self._pinned.add(address)
        # NumPy tells that an array ends before it lets go of the memory below it.
        weakref.finalize(segment, self._unpin, address).atexit = False
        return True

    def _unpin(self, address: int) -> None:
        self._pinned.discard(address)  # something else may be mapped there next
        torch.cuda.cudart().cudaHostUnregister(address)

    def let_go(self, word: np.ndarray) -> None:
        """Clear the word of a slot, which says that it is in use, when what was begun so far is done."""
        device = _gpu_in_use() if may_be_read() else None
        if device is None:
            word[0] = 0
            return
        with torch.cuda.device(device):
            event = torch.cuda.Event()
            event.record()
        with self._lock:
            self._reading.append((event, word))
        self.look()

    def look(self) -> None:
        """Free what copies are done with."""
        with self._lock:
            if not self._reading:
                return
            busy = []
            for event, word in self._reading:
                if event.query():
                    word[0] = 0
                else:
                    busy.append((event, word))
            self._reading = busy


def _gpu_in_use() -> int | None:
    """A GPU that this process uses already: threads of the feed must not begin to use another one."""
    used: Any = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    if used is None or not torch.cuda.is_initialized():
        return None
    return next((index for index in range(torch.cuda.device_count()) if used(index)), None)
