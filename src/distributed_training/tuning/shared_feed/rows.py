"""Rows of samples in memory that several processes have: a matrix of bytes for each tensor of a sample."""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Any

import numpy as np
import torch

from distributed_training.feed.columns import (
    Matrix,
    Shape,
    Unkept,
    as_bytes,
    leaf_shapes,
    put_together,
    row_width,
    same_shape,
    take_apart,
)

_ADD_SEALS, _SEALS = 1033, 1 | 2 | 4  # of linux/fcntl.h: may not be sealed further, shrink or grow
_NAME = "dtrain-shared-feed"
_ALIGNED = 64


def sample_width(shape: Shape) -> int:
    """Bytes of a sample that is built so. Raises Unkept where samples have no fixed size."""
    widths = [row_width(leaf) if leaf[0] in ("tensor", "array") else 0 for leaf in leaf_shapes(shape)]
    if not widths or not all(widths):
        raise Unkept("a sample has parts that are no tensors of a fixed size")
    return sum(widths)


class RowStore:
    """So many slots for samples that are built alike. Who writes which slot, and when it may be read, others decide."""

    def __init__(self, shape: Shape, slots: int, fd: int | None = None) -> None:
        """`fd`: memory that another process made; left out, it is made here. Either way it is closed by `close`."""
        self.shape, self.slots = shape, slots
        widths = [row_width(leaf) for leaf in leaf_shapes(shape)]
        begins, end = [], 0
        for width in widths:
            begins.append(end)
            end += -(-slots * width // _ALIGNED) * _ALIGNED
        self.fd = _make(end) if fd is None else fd
        memory = np.frombuffer(mmap.mmap(self.fd, end), np.uint8)
        self._columns = [
            Matrix(leaf, memory[begin : begin + slots * width].reshape(slots, width))
            for leaf, begin, width in zip(leaf_shapes(shape), begins, widths)
        ]

    def put(self, slots: np.ndarray, data: Any) -> None:
        """Write a batch, each sample into its slot. Raises Unkept where it is not built as the others are."""
        shape, leaves = take_apart(data, len(slots))
        if not same_shape(shape, self.shape):
            raise Unkept("samples differ in shape")
        rows = np.arange(len(slots))
        for column, leaf in zip(self._columns, leaves):
            column.put(slots, leaf, rows)

    def take(self, slots: np.ndarray, others: np.ndarray, data: Any) -> Any:
        """A batch of the samples in these slots; the rows `others` of it are those of `data`. Raises Unkept."""
        leaves = [column.take(slots, _allocate) for column in self._columns]
        if len(others):
            shape, own = take_apart(data, len(others))
            if not same_shape(shape, self.shape):
                raise Unkept("samples differ in shape")
            for leaf, part in zip(leaves, own):
                as_bytes(leaf)[torch.from_numpy(others)] = as_bytes(part)
        return put_together(self.shape, iter(leaves))

    def close(self) -> None:
        """Let go of the memory; it is gone when nobody has it mapped."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _make(size: int) -> int:
    fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, _ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _allocate(size: int) -> memoryview:
    return np.empty(size, np.uint8).data
