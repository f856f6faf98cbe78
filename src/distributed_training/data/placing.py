"""Batches put together where they are to lie: rows are gathered and samples stacked straight into that memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distributed_training.data.arrays import UNSIGNED, gather_rows
from distributed_training.data.base import LooseRows, StoredRows
from distributed_training.data.nested import map_values

ALIGNMENT = 64


class Memory(NamedTuple):
    """A kind of memory that tensors can be made in. What is made belongs to the caller for as long as it lives."""

    empty: Callable[..., Tensor]
    """As `torch.empty(shape, dtype=...)`."""
    copy: Callable[[Tensor], Tensor]
    """A tensor in this memory with the same values and strides."""
    holds: Callable[[Tensor], bool] = lambda tensor: False
    """Whether a tensor lies in it already."""
    plain: bool = False
    """Whether rows that are put together in it are contiguous, whatever order of elements torch would choose."""


ORDINARY = Memory(torch.empty, lambda tensor: tensor, lambda tensor: True)
# torch itself uses pinned memory again only when copies from it are done that were begun with `non_blocking=True`.
PINNED = Memory(functools.partial(torch.empty, pin_memory=True), torch.Tensor.pin_memory, torch.Tensor.is_pinned)


class Room:
    """A piece of memory, given out from `start` on. What does not fit into it is made elsewhere."""

    def __init__(self, block: Tensor, start: int = 0) -> None:
        self._block, self._used = block, start
        self.memory = Memory(self.empty, self.copy)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """As `Memory.empty`."""
        size = math.prod(shape) * dtype.itemsize
        start, end = self._used, self._used + size
        if end > len(self._block):
            return torch.empty(shape, dtype=dtype)
        self._used += aligned(size)
        return self._block[start:end].view(dtype).view(shape)

    def copy(self, tensor: Tensor) -> Tensor:
        """As `Memory.copy`, of a contiguous tensor."""
        return self.empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)


def aligned(size: int) -> int:
    """Where the next tensor begins after one of so many bytes."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def place(data: Any, memory: Memory) -> Any:
    """A batch as `Dataset.fetch` gives it, in this memory; made of one as `read_blocks(gathered=False)` gives it.

    Loose samples that do not fit together raise RuntimeError.
    """
    return map_values(lambda part: _placed(part, memory), data, (Tensor, StoredRows, LooseRows))


def _placed(part: Tensor | StoredRows | LooseRows, memory: Memory) -> Tensor:
    if isinstance(part, StoredRows):
        return _gather(part, memory)
    if isinstance(part, LooseRows):
        return _stack(part, memory)
    return part if memory.holds(part) else memory.copy(part)


def _gather(rows: StoredRows, memory: Memory) -> Tensor:
    tensor, index = rows.tensor, torch.from_numpy(rows.ids)
    if tensor.dtype in UNSIGNED:
        return memory.copy(gather_rows(tensor, index))
    return torch.index_select(
        tensor, 0, index, out=memory.empty((len(rows.ids), *tensor.shape[1:]), dtype=tensor.dtype)
    )


def _stack(rows: LooseRows, memory: Memory) -> Tensor:
    first = rows.samples[0]
    # Stacked by torch alone, samples with other strides (channels last) give a batch with such strides. Those that a
    # gradient is kept for cannot be stacked into anything that is there.
    if not all(map(Tensor.is_contiguous, rows.samples)) or any(sample.requires_grad for sample in rows.samples):
        return memory.copy(torch.stack(list(rows.samples)))
    into = memory.empty((len(rows.samples), *first.shape), dtype=first.dtype)
    return torch.stack(list(rows.samples), out=into)
