"""Batches between two processes of one machine: written once into memory that both have, announced on the connection.

A worker makes a segment without a name (memfd), seals its size, and writes each frame's payload into a slot. The GPU
side maps it through /proc, after it has seen that it is such a segment, of the same user, that can never shrink: so
no peer can make a read fail. Each slot begins with a word that says whether it is in use; the GPU side clears it when
the last tensor that looks at the slot is gone. Nothing has a name in the file system, so nothing is left behind,
however the processes end.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from distributed_training.feed.rows import Rows
from distributed_training.wire import PackedBatch

# linux/fcntl.h; Python 3.11 has no names for them on every build
_ADD_SEALS, _GET_SEALS = 1033, 1034
_SEALS = 1 | 2 | 4  # may not be sealed further, shrink or grow
_HEAD = 64  # bytes before the payload of a slot; its first word says whether the slot is in use
_MOST_SLOTS = 256
_SMALLEST_SLOT = 64 << 10
_FD_BITS, _TIME_BITS = 20, 20
_MOST_SEGMENTS = 64
_PAGE = mmap.PAGESIZE


@functools.cache
def host_id() -> str:
    """Names this machine, user and view of processes; empty where memory cannot be shared this way."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        processes = os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
    if not hasattr(os, "memfd_create"):
        return ""
    return hashlib.sha256(f"{boot} {processes} {os.geteuid()}".encode()).hexdigest()[:32]


class _Placed:
    """Takes the place of a buffer that lies in shared memory now, so that its own memory is free."""

    __slots__ = ("_size",)

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size


class Arena:
    """A worker's segments for one connection. One thread writes; slots come back by themselves."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._fd = -1
        self._bytes = np.empty(0, np.uint8)
        self._words = np.empty(0, np.uint32)
        self._slot = self._slots = 0
        self._made = 0

    def write(self, batches: Sequence[PackedBatch]) -> tuple[int, int] | None:
        """Put the payload of a frame into shared memory; its place, or None where there is no room now."""
        size = sum([batch.size for batch in batches])
        if size + _HEAD > self._slot and not self._make(size + _HEAD):
            return None
        stride = self._slot // 4
        for slot in range(self._slots):  # the first that is free: those at the end are never touched if not needed
            if not self._words[slot * stride]:
                break
        else:
            return None
        self._words[slot * stride] = 1
        begin = at = slot * self._slot + _HEAD
        for batch in batches:
            for buffer in batch.buffers:
                if length := len(buffer):
                    if isinstance(buffer, Rows):
                        buffer.gather(self._bytes[at : at + length])
                    else:
                        self._bytes[at : at + length] = np.frombuffer(buffer, np.uint8)
                    at += (length + 63) & -64
            batch.buffers = [_Placed(len(buffer)) for buffer in batch.buffers]  # type: ignore[misc]
        return self._number, begin

    @property
    def _number(self) -> int:
        """Where the other side finds the segment: process, file descriptor, and which of its segments it is."""
        return (os.getpid() << _FD_BITS | self._fd) << _TIME_BITS | self._made

    def _make(self, least: int) -> bool:
        """A segment with slots of at least this size, in place of the one before."""
        slot = max(_SMALLEST_SLOT, -(-(least + least // 4) // _PAGE) * _PAGE)
        slots = min(_MOST_SLOTS, self._memory // slot)
        if slots < 2 or self._made >= 1 << _TIME_BITS:
            return False
        self.close()
        try:
            fd = os.memfd_create("dtrain-feed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError:
            return False
        self._fd = fd
        os.ftruncate(fd, slot * slots)
        fcntl.fcntl(fd, _ADD_SEALS, _SEALS)
        if fd >= 1 << _FD_BITS:
            self.close()
            return False
        self._bytes = np.frombuffer(mmap.mmap(fd, slot * slots), np.uint8)
        self._words = self._bytes.view(np.uint32)
        self._slot, self._slots = slot, slots
        self._made += 1
        return True

    def close(self) -> None:
        """Let go of the memory; what the other side has mapped stays with it."""
        self._bytes, self._words = np.empty(0, np.uint8), np.empty(0, np.uint32)
        self._slot = self._slots = 0
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Segments:
    """The GPU side's view of a worker's segments."""

    def __init__(self) -> None:
        self._segments: dict[int, np.ndarray] = {}
        self._lent: dict[int, Any] = {}

    def locate(self, number: int, begin: int, size: int) -> memoryview | None:
        """The payload at a place that the worker named (the form that `wire` takes); None where there is none."""
        segment = self._segments.get(number)
        if segment is None:
            segment = self._map(number)
            if segment is None:
                return None
            while len(self._segments) >= _MOST_SEGMENTS:
                del self._segments[next(iter(self._segments))]
            self._segments[number] = segment
        if begin < _HEAD or begin + size > len(segment):
            return None
        lent = segment[begin : begin + size]
        key = id(lent)
        self._lent[key] = weakref.ref(lent, _freeing(self._lent, key, segment[begin - _HEAD : begin].view(np.uint32)))
        return lent.data

    def close(self) -> None:
        """Forget all segments; each is unmapped when nobody looks at it any more."""
        self._segments.clear()

    def _map(self, number: int) -> np.ndarray | None:
        """Map a segment of another process, if it is what it has to be."""
        fd_number, process = number >> _TIME_BITS & (1 << _FD_BITS) - 1, number >> _TIME_BITS + _FD_BITS
        path = f"/proc/{process}/fd/{fd_number}"
        with suppress(OSError, ValueError):
            if os.stat(f"/proc/{process}").st_uid != os.geteuid() or not os.readlink(path).startswith(
                "/memfd:dtrain-feed"
            ):
                return None
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                if fcntl.fcntl(fd, _GET_SEALS) & _SEALS != _SEALS:
                    return None
                return np.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), np.uint8)
            finally:
                os.close(fd)
        return None


def _freeing(lent: dict[int, Any], key: int, word: np.ndarray) -> Callable[[Any], None]:
    def free(_: Any) -> None:
        lent.pop(key, None)
        word[0] = 0

    return free
