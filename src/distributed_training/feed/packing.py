"""Batches made ready to be sent; those that were fetched together, as runs of neighbouring steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor

from distributed_training.data.base import LooseRows, Share, StoredRows
from distributed_training.data.nested import values_in
from distributed_training.data.steps import Block
from distributed_training.feed.rows import Loose, Rows
from distributed_training.feed.tensors import as_raw
from distributed_training.wire import PackedBatch, pack_batch
from distributed_training.wire.batches import id_bytes
from distributed_training.wire.messages import Lease
from distributed_training.wire.tensors import describe

RUN = 4 << 20
"""Bytes of small batches that travel together: enough for what each frame costs, few enough for a cache."""
_MOST = 64  # steps in one run


def pack(lease: Lease, block: Block, seconds: float, run: int = RUN) -> list[PackedBatch]:
    """The steps of a block, which took so many seconds to load; in runs of about `run` bytes."""
    together = _pack_together(lease, block, seconds, run) if len(block.steps) > 1 else None
    return together if together is not None else _pack_steps(lease, block, seconds)


def _pack_together(lease: Lease, block: Block, seconds: float, run: int) -> list[PackedBatch] | None:
    """All steps of a block as runs; None where they are not mere rows of tensors and have to be taken one by one.

    The block is described once. A run of steps of equal size is a piece of each of its buffers: what is said of it
    differs only in the number of rows.
    """
    rows = [len(ids) for ids in block.own]
    total = sum(rows)
    shapes = [_shape(part) for part in values_in(block.data, (Tensor, StoredRows, LooseRows))]
    if not all(shape and shape[0] == total for shape in shapes):
        return None
    whole = describe(block.data, as_raw)
    if whole.values or len(whole.buffers) != len(shapes) or len(whole.dims) != sum(map(len, shapes)):
        return None
    first_dims = [sum(map(len, shapes[:at])) for at in range(len(shapes))]
    width = 8 + sum([len(buffer) // total for buffer in whole.buffers])
    ids = id_bytes(np.concatenate(block.own))
    packed: list[PackedBatch] = []
    start = 0
    for first, steps, size in _runs(rows, max(1, run // width)):
        dims = list(whole.dims)
        for at in first_dims:
            dims[at] = steps * size
        end = start + steps * size
        buffers = [_part(buffer, start, end, total) for buffer in whole.buffers]
        head = (lease.epoch, block.first + first, lease.rank, lease.ranks, seconds * steps / len(rows))
        packed.append(PackedBatch(head, ids[start * 8 : end * 8], (whole.tree, dims, [], buffers), steps))
        start = end
    return packed


def _runs(rows: list[int], enough: int) -> Iterator[tuple[int, int, int]]:
    """(first step, steps, rows of each) of neighbouring steps of equal size, up to `enough` rows together."""
    first = 0
    while first < len(rows):
        most = max(1, min(_MOST, enough // max(1, rows[first])))
        last = first + 1
        while last < len(rows) and last - first < most and rows[last] == rows[first]:
            last += 1
        yield first, last - first, rows[first]
        first = last


def _shape(part: Tensor | StoredRows | LooseRows) -> tuple[int, ...]:
    """Of a tensor of a batch, one that is not gathered included."""
    if isinstance(part, StoredRows):
        return (len(part.ids), *part.tensor.shape[1:])
    return (len(part.samples), *part.samples[0].shape) if isinstance(part, LooseRows) else tuple(part.shape)


def _part(buffer: Any, first: int, last: int, total: int) -> Any:
    """Some rows of a buffer of so many."""
    if isinstance(buffer, (Rows, Loose)):
        return buffer.part(first, last)
    width = len(buffer) // total
    return buffer[first * width : last * width]


def _pack_steps(lease: Lease, block: Block, seconds: float) -> list[PackedBatch]:
    """The steps of a block one by one, whatever they hold."""
    rank, ranks, each = lease.rank, lease.ranks, seconds / len(block.steps)
    return [
        pack_batch(lease.epoch, step, batch.ids, batch.data, rank=rank, ranks=ranks, seconds=each, adapt=as_raw)
        for step, batch in block.batches(Share(rank, ranks))
    ]
