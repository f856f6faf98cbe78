"""Where payloads are received: memory that the caller provides, pinned or shared, or plain memory where it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from distributed_training.wire.errors import MisuseError, PeerError
from distributed_training.wire.frames import ALIGNMENT, Kind

Allocate = Callable[[int, Kind, int], Any]
"""(size, kind, stream) -> memory for a payload: any writable object of that size or more, kept as `Batch.memory`."""
Locate = Callable[[int, int, int], Any]
"""(segment, begin, size) -> memory that is shared with the peer; None where there is no such place."""


def allocate_aligned(size: int, kind: Kind, stream: int) -> memoryview:
    """Fresh memory that begins at a multiple of 64: what is used where the caller gives no allocator."""
    block = np.empty(size + ALIGNMENT, np.uint8)
    start = -block.ctypes.data % ALIGNMENT
    return block[start : start + size].data


def first_bytes(memory: Any, size: int) -> memoryview:
    """The first `size` bytes of what an allocator returned."""
    view = memoryview(memory).cast("B")
    if len(view) < size:
        raise MisuseError(f"the allocator returned {len(view)} bytes where {size} are needed")
    return view if len(view) == size else view[:size]


def shared_memory(locate: Locate | None, segment: int, begin: int, size: int) -> Any:
    """Shared memory at a place that the peer named; refuses a place that is none."""
    memory = locate(segment, begin, size) if locate is not None else None
    if memory is None or memoryview(memory).nbytes < size:
        raise PeerError(f"a payload of {size} bytes at byte {begin} of shared segment {segment}, where there is none")
    return memory
