"""Batches between two processes of one machine: written once into memory that both have, announced on the connection.

A worker makes a segment without a name (memfd), seals its size, and writes each frame's payload into a slot. The GPU
side maps it through /proc, after it has seen that it is such a segment, of the same user, that can never shrink: so
no peer can make a read fail. Each slot begins with a word that says whether it is in use; the GPU side clears it when
the last tensor that looks at the slot is gone. The next word has the slot's size, so that it can be pinned. Nothing
has a name in the file system, so nothing is left behind, however the processes end.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import logging
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from distributed_training.data.placing import Memory, Room, aligned
from distributed_training.feed.buffers import own_array
from distributed_training.feed.pinning import PinnedSlots
from distributed_training.feed.rows import Loose, Rows
from distributed_training.wire import PackedBatch

logger = logging.getLogger(__name__)

Gather = Callable[[Rows | Loose, np.ndarray], None]

# linux/fcntl.h; Python 3.11 has no names for them on every build
_ADD_SEALS, _GET_SEALS = 1033, 1034
_SEALS = 1 | 2 | 4  # may not be sealed further, shrink or grow
_HEAD = 64  # bytes before the payload of a slot; its first word says whether the slot is in use
_BETWEEN = 1 << 10  # bytes of a slot for what lies between tensors
_MOST_SLOTS = 256
_FEW_SLOTS = 8
_SMALLEST_SLOT = 64 << 10
_FD_BITS, _INODE_BITS = 16, 25
_INODES = (1 << _INODE_BITS) - 1
_NAME = "dtrain-feed"
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


class _Segment:
    """Memory of a worker that is divided into slots of one size."""

    def __init__(self, slot: int, slots: int) -> None:
        self.slot, self.slots = slot, slots
        self.fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, slot * slots)
            fcntl.fcntl(self.fd, _ADD_SEALS, _SEALS)
            self.bytes = np.frombuffer(mmap.mmap(self.fd, slot * slots), np.uint8)
            if self.fd >= 1 << _FD_BITS:
                raise OSError("too many open files to share memory")
        except BaseException:
            os.close(self.fd)
            raise
        self.used = self.bytes.view(np.uint32)[:: slot // 4]
        self.sizes = self.bytes.view(np.uint32)[1 :: slot // 4]
        """A word for each slot, not 0 while it is in use."""
        self.address = int(self.bytes.ctypes.data)
        self.number = (os.getpid() << _FD_BITS | self.fd) << _INODE_BITS | os.fstat(self.fd).st_ino & _INODES
        """Where the other side finds it: process and file descriptor; the inode proves that it is the same one."""

    def free_slot(self) -> int | None:
        """The first slot that is not in use: those at the end are never touched if they are not needed."""
        for slot in range(min(_FEW_SLOTS, self.slots)):  # nearly always; to look at all of them takes longer
            if not self.used[slot]:
                return slot
        free = self.used == 0
        first = int(free.argmax())
        return first if free[first] else None


class _Lent(NamedTuple):
    """A slot whose memory was given out."""

    segment: _Segment
    slot: int
    ids: int
    """Bytes in front that are kept for sample ids."""

    @property
    def begin(self) -> int:
        """Where its payload begins."""
        return self.slot * self.segment.slot + _HEAD

    def has(self, batch: PackedBatch) -> bool:
        """Whether the buffers of a batch lie there as they would be written, but for the sample ids."""
        at = self.segment.address + self.begin + self.ids
        if aligned(len(batch.buffers[0])) != self.ids:
            return False
        for buffer in batch.buffers[1:]:
            if len(buffer) and (not isinstance(buffer, memoryview) or _address(buffer) != at):
                return False
            at += aligned(len(buffer))
        return True


class Arena:
    """A worker's shared memory for one connection. One thread writes; slots come back by themselves."""

    def __init__(self, memory: int, gather: Gather = lambda buffer, memory: buffer.gather(memory)) -> None:
        """`gather` puts the rows of a buffer together in memory of their size."""
        self._memory, self._gather = memory, gather
        self._segment: _Segment | None = None
        self._former: list[_Segment] = []
        """Segments with smaller slots. They stay until the other side, which may not have seen them yet, is done."""
        self._lent: _Lent | None = None

    def room(self, rows: int, sample_bytes: int) -> Memory | None:
        """A slot's memory, for so many rows to be put together in; None where there is no room now.

        It is to be handed back by `finish`, or is lost with the next call.
        """
        self._take_back()
        ids = aligned(8 * rows)
        segment, slot = self._free_slot(_HEAD + ids + aligned(rows * sample_bytes) + _BETWEEN)
        if segment is None or slot is None:
            return None
        segment.used[slot] = 1
        self._lent = lent = _Lent(segment, slot, ids)
        memory = segment.bytes[lent.begin + ids : (slot + 1) * segment.slot]
        return Room(torch.from_numpy(memory)).memory

    def finish(self, batches: Sequence[PackedBatch]) -> tuple[int, int] | None:
        """These were put together where `room` said. Their place, if they are one run that lies there as it should;
        else what they hold is not in shared memory any more."""
        lent = self._lent
        if lent is None:
            return None
        if len(batches) == 1 and lent.has(batches[0]):
            self._lent, segment = None, lent.segment
            ids = np.frombuffer(batches[0].buffers[0], np.uint8)
            segment.bytes[lent.begin : lent.begin + len(ids)] = ids
            return self._announced(segment, lent.slot, batches)
        for batch in batches:  # a shorter last step, which is a run of its own
            batch.buffers = [
                np.array(np.frombuffer(buffer, np.uint8)).data if isinstance(buffer, memoryview) else buffer
                for buffer in batch.buffers
            ]
        self._take_back()
        return None

    def _take_back(self) -> None:
        if self._lent is not None:
            self._lent.segment.used[self._lent.slot] = 0
            self._lent = None

    def write(self, batches: Sequence[PackedBatch]) -> tuple[int, int] | None:
        """Put the payload of a frame into shared memory; its place, or None where there is no room now."""
        segment, slot = self._free_slot(sum([batch.size for batch in batches]) + _HEAD)
        if segment is None or slot is None:
            return None
        at = slot * segment.slot + _HEAD
        for batch in batches:
            for buffer in batch.buffers:
                if length := len(buffer):
                    if isinstance(buffer, (Rows, Loose)):
                        self._gather(buffer, segment.bytes[at : at + length])
                    else:
                        segment.bytes[at : at + length] = np.frombuffer(buffer, np.uint8)
                    at += aligned(length)
        segment.used[slot] = 1  # only now: samples that do not fit together leave it free
        return self._announced(segment, slot, batches)

    def _announced(self, segment: _Segment, slot: int, batches: Sequence[PackedBatch]) -> tuple[int, int]:
        """The place of a slot that holds the payload of these; their own memory is free."""
        for batch in batches:
            batch.buffers = [_Placed(len(buffer)) for buffer in batch.buffers]  # type: ignore[misc]
        segment.sizes[slot] = segment.slot // _PAGE
        return segment.number, slot * segment.slot + _HEAD

    def _free_slot(self, size: int) -> tuple[_Segment | None, int | None]:
        """A slot of at least so many bytes; None where there is none now."""
        if self._former:
            self._close([former for former in self._former if not former.used.any()])
        segment = self._segment
        if segment is None or size > segment.slot:
            segment = self._larger(size)
        return segment, segment.free_slot() if segment is not None else None

    def _larger(self, least: int) -> _Segment | None:
        """A segment with slots of at least this size, in place of the one before; None where that is not possible."""
        slot = max(_SMALLEST_SLOT, -(-(least + least // 4) // _PAGE) * _PAGE)
        segments = [*self._former, self._segment] if self._segment is not None else self._former
        held = sum(segment.slot * segment.slots for segment in segments)
        slots = min(_MOST_SLOTS, (self._memory - held) // 2 // slot)  # and as much for a larger one to come
        if slots < 2:
            return None
        try:
            segment = _Segment(slot, slots)
        except OSError as error:
            logger.debug("no shared memory: %s", error)
            return None
        if self._segment is not None:
            self._former.append(self._segment)
        self._segment = segment
        return segment

    def _close(self, segments: list[_Segment]) -> None:
        for segment in segments:
            os.close(segment.fd)
            self._former.remove(segment)

    def close(self) -> None:
        """Let go of the memory; what the other side has mapped stays with it."""
        if self._segment is not None:
            self._former.append(self._segment)
            self._segment = None
        self._close(list(self._former))


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


class Segments:
    """The GPU side's view of a worker's segments."""

    def __init__(self) -> None:
        self._segments: dict[int, np.ndarray] = {}
        self._lent: dict[int, Any] = {}
        self._slots = PinnedSlots()

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
        self._slots.look()
        lent = own_array(segment.data[begin : begin + size])
        key = id(lent)
        word = segment[begin - _HEAD : begin].view(np.uint32)
        pinned = self._pin(segment, begin - _HEAD, size + _HEAD, int(word[1]) * _PAGE)
        self._lent[key] = weakref.ref(lent, _freeing(self._lent, key, word, self._slots if pinned else None))
        return lent.data

    def _pin(self, segment: np.ndarray, begin: int, needed: int, slot: int) -> bool:
        """Pin the slot, if what the other side says of its size can be."""
        if begin % _PAGE or needed > slot or begin + slot > len(segment):
            return False
        return self._slots.pin(segment, begin, slot)

    def close(self) -> None:
        """Forget all segments; each is unmapped when nobody looks at it any more."""
        self._segments.clear()

    def _map(self, number: int) -> np.ndarray | None:
        """Map a segment of another process, if it is what it has to be."""
        fd_number, process = number >> _INODE_BITS & (1 << _FD_BITS) - 1, number >> _INODE_BITS + _FD_BITS
        path = f"/proc/{process}/fd/{fd_number}"
        with suppress(OSError, ValueError):
            if os.stat(f"/proc/{process}").st_uid != os.geteuid():
                return None
            if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
                return None
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                known = os.fstat(fd)
                if fcntl.fcntl(fd, _GET_SEALS) & _SEALS != _SEALS or known.st_ino & _INODES != number & _INODES:
                    return None
                return np.frombuffer(mmap.mmap(fd, known.st_size), np.uint8)
            finally:
                os.close(fd)
        return None


def _freeing(lent: dict[int, Any], key: int, word: np.ndarray, slots: PinnedSlots | None) -> Callable[[Any], None]:
    def free(_: Any) -> None:
        lent.pop(key, None)
        if slots is not None:
            slots.let_go(word)
        else:
            word[0] = 0

    return free
