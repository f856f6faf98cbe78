"""Batches on their way to the GPU: copied on a stream of their own, while the step before them is computed.

A copy on the stream that computes would wait for all that was queued there, and hold up what comes after it. On its
own stream it needs nothing but the bus. The stream that computes is told to wait for the copy, not the program.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from distributed_training.data.base import Batch
from distributed_training.data.nested import tensors_in, to_device
from distributed_training.runtime.errors import DistributedTrainingError

_AHEAD = 2  # batches on the device at a time that were not computed yet


@dataclass
class _Copy:
    """A batch that is being copied, or was."""

    step: int
    batch: Batch
    """On the device; its `host` is where it is copied from."""
    done: torch.cuda.Event


def copied_ahead(
    batches: Iterator[tuple[int, Batch]], device: torch.device, at_hand: Callable[[], bool]
) -> Iterator[tuple[int, Batch]]:
    """The same batches on the device, the next one on its way while one is computed.

    `at_hand` says whether the next batch can be had without waiting: while it cannot, nobody waits for it before the
    batch that is here is used. Nor does an error in its place come before its turn. The memory that a batch came in is
    kept until its copy is done, whoever lets go of it.
    """
    stream = torch.cuda.Stream(device)
    copies: deque[_Copy] = deque()
    reading: deque[tuple[torch.cuda.Event, Any]] = deque()
    failure: DistributedTrainingError | None = None
    try:
        while True:
            while len(copies) < _AHEAD and failure is None and (not copies or at_hand()):
                try:
                    step, batch = next(batches)
                except StopIteration:
                    break
                except DistributedTrainingError as error:
                    failure = error
                    break
                copies.append(_begin(step, batch, device, stream))
                reading.append((copies[-1].done, batch.data))
                del batch
            if not copies:
                if failure is not None:
                    raise failure
                return
            copy = copies.popleft()
            _hand_over(copy, device)
            yield copy.step, copy.batch
            del copy
            while reading and reading[0][0].query():
                reading.popleft()
    finally:
        for done, _ in reading:
            done.synchronize()


def _begin(step: int, batch: Batch, device: torch.device, stream: torch.cuda.Stream) -> _Copy:
    with torch.cuda.stream(stream):
        moved = replace(batch, data=to_device(batch.data, device), host=batch.data)
        done = torch.cuda.Event()
        done.record(stream)
    return _Copy(step, moved, done)


def _hand_over(copy: _Copy, device: torch.device) -> None:
    """From here on the computing stream may use it, and its memory is not used again before that is done."""
    computing = torch.cuda.current_stream(device)
    computing.wait_event(copy.done)
    for tensor in tensors_in(copy.batch.data):
        tensor.record_stream(computing)
