"""Batches put together where they are to lie: rows are gathered and samples stacked straight into that memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distributed_training.data.arrays import UNSIGNED, gather_rows
from distributed_training.data.base import LooseRows, StoredRows
from distributed_training.data.nested import map_values


class Memory(NamedTuple):
    """A kind of memory that tensors can be made in. What is made belongs to the caller for as long as it lives."""

    empty: Callable[..., Tensor]
    """As `torch.empty(shape, dtype=...)`."""
    copy: Callable[[Tensor], Tensor]
    """A tensor in this memory with the same values and strides."""


# torch itself uses pinned memory again only when copies from it are done that were begun with `non_blocking=True`.
PINNED = Memory(functools.partial(torch.empty, pin_memory=True), torch.Tensor.pin_memory)


def place(data: Any, memory: Memory) -> Any:
    """A batch as `Dataset.fetch` gives it, in this memory; made of one as `read_blocks(gathered=False)` gives it.

    Loose samples that do not fit together raise RuntimeError.
    """
    return map_values(lambda part: _placed(part, memory), data, (Tensor, StoredRows, LooseRows))


def _placed(part: Tensor | StoredRows | LooseRows, memory: Memory) -> Tensor:
    if isinstance(part, StoredRows):
        return _gather(part, memory)
    return _stack(part, memory) if isinstance(part, LooseRows) else memory.copy(part)


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
