"""Batches made ready to be sent, many at once where they were fetched together."""

from __future__ import annotations

from distributed_training.data.base import Share
from distributed_training.data.nested import tensors_in
from distributed_training.data.steps import Block
from distributed_training.feed.tensors import as_raw
from distributed_training.wire import PackedBatch, pack_batch
from distributed_training.wire.messages import Lease
from distributed_training.wire.tensors import describe


def pack(lease: Lease, block: Block, seconds: float) -> list[PackedBatch]:
    """The steps of a block, which took so many seconds to load."""
    together = _pack_together(lease, block, seconds) if len(block.steps) > 1 else None
    return together if together is not None else _pack_steps(lease, block, seconds)


def _pack_together(lease: Lease, block: Block, seconds: float) -> list[PackedBatch] | None:
    """All steps of a block; None where they are not mere rows of tensors and have to be taken one by one.

    The block is described once. Each step is then a piece of each of its buffers: what is said of it differs only in
    the number of rows.
    """
    rows = [len(ids) for ids in block.own]
    total = sum(rows)
    tensors = list(tensors_in(block.data))
    if not all(tensor.ndim and len(tensor) == total for tensor in tensors):
        return None
    whole = describe(block.data, as_raw)
    if whole.values or len(whole.buffers) != len(tensors) or len(whole.dims) != sum(t.ndim for t in tensors):
        return None
    widths = [len(buffer) // total for buffer in whole.buffers]
    first_dims = []
    at = 0
    for tensor in tensors:
        first_dims.append(at)
        at += tensor.ndim
    packed: list[PackedBatch] = []
    known: dict[int, list[int]] = {}
    start = 0
    each = seconds / len(rows)
    for step, (ids, size) in enumerate(zip(block.own, rows), block.first):
        dims = known.get(size)
        if dims is None:
            dims = list(whole.dims)
            for at in first_dims:
                dims[at] = size
            known[size] = dims
        end = start + size
        buffers = [buffer[start * width : end * width] for buffer, width in zip(whole.buffers, widths)]
        head = (lease.epoch, step, lease.rank, lease.ranks, each)
        packed.append(PackedBatch(head, ids, (whole.tree, dims, [], buffers)))
        start = end
    return packed


def _pack_steps(lease: Lease, block: Block, seconds: float) -> list[PackedBatch]:
    """The steps of a block one by one, whatever they hold."""
    rank, ranks, each = lease.rank, lease.ranks, seconds / len(block.steps)
    return [
        pack_batch(lease.epoch, step, batch.ids, batch.data, rank=rank, ranks=ranks, seconds=each, adapt=as_raw)
        for step, batch in block.batches(Share(rank, ranks))
    ]
