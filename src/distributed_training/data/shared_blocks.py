"""Batches from loader processes, in shared memory that is used again.

New shared memory for every batch is dear: its pages are cleared and mapped in both processes, and a file descriptor
travels for each tensor. Here a worker has a few blocks, each of which travels once. A batch is put together in a block
that nobody looks at; what travels then is where in the block its tensors lie. The first byte of a block says whether it
is in use: the worker sets it when a batch goes into the block, the receiver clears it when the last tensor that looks
at the batch is gone. So nobody who keeps a batch ever sees it overwritten; where batches are kept and no block is free,
they go the usual way.
"""

from __future__ import annotations

import itertools
import os
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from distributed_training.data.arrays import UNSIGNED
from distributed_training.data.base import LooseRows, StoredRows
from distributed_training.data.nested import map_tensors, map_values, values_in
from distributed_training.data.placing import ALIGNMENT, ORDINARY, Room, aligned, place

_MOST_BLOCKS = 8  # of a worker: two batches that wait, one in the making, and some that the receiver looks at
_HEADER = ALIGNMENT
_PAGE = 4096


class BlockSender:
    """The side of a worker: puts batches into blocks. `to` is the number of the `BlockReceiver`."""

    def __init__(self, to: int) -> None:
        self._to = to
        self._blocks: dict[int, Tensor] = {}
        self._numbers = itertools.count()

    def pack(self, data: Any) -> Any:
        """What is to be sent of a batch as `read_blocks(gathered=False)` gives it; it arrives as `fetch` gives it.

        Loose samples that do not fit together raise RuntimeError.
        """
        size = _size_in_block(data)
        found = self._free_block(_HEADER + size) if size else None
        if found is None:
            return place(data, ORDINARY)
        number, new, gone = found
        block = self._blocks[number]
        room = Room(block, _HEADER)
        placed = place(data, room.memory)
        block[0] = 1
        spots = map_tensors(lambda tensor: _Spot.of(tensor, block), placed)
        return _Packed(self._to, number, block if new else None, gone, spots)

    def _free_block(self, size: int) -> tuple[int, bool, int | None] | None:
        """(its number, whether it is new, the number of one that is given up for it); None where all are in use."""
        free = [number for number, block in self._blocks.items() if not block[0]]
        for number in free:
            if len(self._blocks[number]) >= size:
                return number, False, None
        gone = None
        if len(self._blocks) >= _MOST_BLOCKS:
            if not free:
                return None
            gone = min(free, key=lambda number: len(self._blocks[number]))
            del self._blocks[gone]
        number = next(self._numbers)
        room = -(-(size + size // 8) // _PAGE) * _PAGE  # a little more: the next batch may be a little larger
        self._blocks[number] = torch.zeros(room, dtype=torch.uint8).share_memory_()
        return number, True, gone


class BlockReceiver:
    """The side that batches are sent to: knows the blocks that came. Packed batches arrive as ordinary ones."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        _receivers[self.number] = self
        self._blocks: dict[tuple[int, int], np.ndarray] = {}

    def unpack(self, worker: int, packed: _Packed) -> Any:
        """The batch, whose end clears the block's first byte."""
        if packed.gone is not None:
            self._blocks.pop((worker, packed.gone), None)
        if packed.block is not None:
            self._blocks[worker, packed.number] = packed.block.numpy()
        block = self._blocks[worker, packed.number]
        # An array that stands on a memoryview is kept alive by all that is made of it: see `feed.buffers.own_array`.
        lent = np.frombuffer(block.data, np.uint8)
        weakref.finalize(lent, block.__setitem__, 0, 0).atexit = False
        return map_values(lambda spot: _tensor_at(lent, spot), packed.spots, _Spot)

    def close(self) -> None:
        """Forget the blocks. Batches that came stay as they are."""
        _receivers.pop(self.number, None)
        self._blocks.clear()


_numbers = itertools.count()
_receivers: dict[int, BlockReceiver] = {}


@dataclass
class _Packed:
    to: int
    number: int
    block: Tensor | None
    gone: int | None
    spots: Any

    def __reduce__(self) -> Any:
        # Unpacked as it arrives: one that is thrown away unseen gives back its block, too.
        return _receive, (os.getpid(), self.to, self.number, self.block, self.gone, self.spots)


def _receive(worker: int, to: int, *fields: Any) -> Any:
    receiver = _receivers.get(to)
    return receiver.unpack(worker, _Packed(to, *fields)) if receiver is not None else None  # closed: nobody wants it


class _Spot(NamedTuple):
    """Where in a block a tensor lies."""

    start: int
    bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor, block: Tensor) -> _Spot:
        """Of a tensor that lies in this block."""
        start = tensor.data_ptr() - block.data_ptr()
        assert 0 <= start <= len(block) - tensor.nbytes
        return cls(start, tensor.nbytes, tensor.dtype, tuple(tensor.shape))


def _tensor_at(block: np.ndarray, spot: _Spot) -> Tensor:
    return torch.from_numpy(block[spot.start : spot.start + spot.bytes]).view(spot.dtype).view(spot.shape)


def _size_in_block(data: Any) -> int:
    """Bytes that a batch takes; 0 where it cannot lie in a block as it is, or would have no use for one."""
    sizes = [_leaf_size(leaf) for leaf in values_in(data, (Tensor, StoredRows, LooseRows))]
    return sum(map(aligned, sizes)) if all(sizes) else 0


def _leaf_size(leaf: Any) -> int:
    if isinstance(leaf, StoredRows):
        as_it_lies = leaf.tensor.dtype in UNSIGNED and not leaf.tensor.is_contiguous()  # torch may keep its strides
        return 0 if as_it_lies else len(leaf.ids) * leaf.tensor[:1].nbytes
    if isinstance(leaf, LooseRows):
        return len(leaf.samples) * leaf.samples[0].nbytes if all(map(_is_plain, leaf.samples)) else 0
    return leaf.nbytes if _is_plain(leaf) else 0


def _is_plain(tensor: Tensor) -> bool:
    plain = type(tensor) is Tensor and tensor.layout is torch.strided and tensor.device.type == "cpu"
    return plain and tensor.is_contiguous() and not tensor.requires_grad and not tensor.is_quantized
