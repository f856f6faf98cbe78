"""Batches on their way to the GPU: copied on a stream of their own, while the step before them is computed.

A copy on the stream that computes would wait for all that was queued there, and hold up what comes after it. On its
own stream it needs nothing but the bus. The stream that computes is told to wait for the copy, not the program.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from distributed_training.data.base import Batch
from distributed_training.data.nested import tensors_in, to_device

_AHEAD = 2  # batches on the device at a time whose step has not begun
_UNDER_WAY, _MOST_UNDER_WAY = 512 << 20, 64  # bytes and number of batches whose step is not done
_WORTH = 1 << 20  # bytes of a batch: a stream of its own costs more than it hides for smaller ones


@dataclass
class _Copy:
    """A batch that is being copied, or was."""

    step: int
    batch: Batch
    """On the device."""
    done: torch.cuda.Event


def copied_if_large(batches: Iterator[tuple[int, Batch]], device: torch.device) -> Iterator[tuple[int, Batch]]:
    """As `copied_ahead`, for batches that somebody has to load: small ones stay where they are."""
    first = next(batches, None)
    if first is None:
        return
    every = itertools.chain([first], batches)
    yield from every if _size(first[1]) < _WORTH else copied_ahead(every, device)


def copied_ahead(
    batches: Iterator[tuple[int, Batch]], device: torch.device, at_hand: Callable[[], bool] | None = None
) -> Iterator[tuple[int, Batch]]:
    """The same batches on the device, the next one on its way while one is computed.

    `at_hand` says whether the next batch can be had without waiting: while it cannot, nobody waits for it before the
    batch that is here is used. Without it, the next batch is loaded while the device is busy with earlier ones. Nor
    does an error in its place come before its turn. The memory that a batch came in is kept until its copy is done,
    whoever lets go of it.
    """
    stream = torch.cuda.Stream(device)
    copies: deque[_Copy] = deque()
    reading: deque[tuple[torch.cuda.Event, Any]] = deque()
    computing: deque[torch.cuda.Event] = deque()
    failure: Exception | None = None
    most = _MOST_UNDER_WAY
    if at_hand is None:
        at_hand = lambda: bool(computing) and not computing[-1].query()  # noqa: E731
    try:
        while True:
            while len(copies) < _AHEAD and failure is None and (not copies or at_hand()):
                try:
                    step, batch = next(batches)
                except StopIteration:
                    break
                except Exception as error:
                    failure = error
                    break
                copies.append(_begin(step, batch, device, stream))
                reading.append((copies[-1].done, batch.data))
                most = _most_under_way(batch)
                del batch
            if not copies:
                if failure is not None:
                    raise failure
                return
            copy = copies.popleft()
            _hand_over(copy, device)
            yield copy.step, copy.batch
            del copy
            computing.append(_mark(device))
            while len(computing) > most:  # the program may be far ahead of the device, but not with all its memory
                computing.popleft().synchronize()
            with copies_are_done():
                while reading and reading[0][0].query():
                    reading.popleft()
    finally:
        for done, _ in reading:
            done.synchronize()


def _begin(step: int, batch: Batch, device: torch.device, stream: torch.cuda.Stream) -> _Copy:
    with torch.cuda.stream(stream):
        moved = replace(batch, data=to_device(batch.data, device), labels=_labels(batch.data))
        done = torch.cuda.Event()
        done.record(stream)
    return _Copy(step, moved, done)


def _labels(data: Any) -> Tensor | None:
    """A copy of what may be class labels: they are looked at on the CPU, and what they came in is used again."""
    labels = data[1] if isinstance(data, (tuple, list)) and len(data) > 1 else None
    if not isinstance(labels, Tensor) or labels.is_cuda or labels.is_floating_point() or labels.ndim != 1:
        return None
    return labels.clone()


def _hand_over(copy: _Copy, device: torch.device) -> None:
    """From here on the computing stream may use it, and its memory is not used again before that is done."""
    computing = torch.cuda.current_stream(device)
    computing.wait_event(copy.done)
    for tensor in tensors_in(copy.batch.data):
        tensor.record_stream(computing)


def _mark(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def _most_under_way(batch: Batch) -> int:
    return max(_AHEAD, min(_MOST_UNDER_WAY, _UNDER_WAY // max(1, _size(batch))))


def _size(batch: Batch) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(batch.data))


# -- memory that is used again

_this_thread = threading.local()


@contextmanager
def copies_are_done() -> Iterator[None]:
    """Who gives pinned memory back within it has seen its copies end: it may be used again at once."""
    _this_thread.done = True
    try:
        yield
    finally:
        _this_thread.done = False


def may_be_read() -> bool:
    """Whether a copy that was begun here may still be reading memory that is given back now."""
    return not getattr(_this_thread, "done", False)
