"""Rows that travel without being gathered first: the copy that sends them gathers them.

Rows of a dataset in memory (`Rows`): on a socket the system reads long ones from where they lie. Samples that were
loaded one by one (`Loose`) are put together once, where they are to lie. In shared memory both come right into their
place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from distributed_training.data.base import LooseRows, StoredRows
from distributed_training.data.nested import values_in
from distributed_training.runtime.errors import DataError


class _Bytes(NamedTuple):
    """A tensor as rows of bytes."""

    tensor: torch.Tensor
    rows: torch.Tensor
    flat: memoryview
    width: int


_KNOWN: dict[int, _Bytes] = {}
_MOST = 256


def _bytes_of(tensor: torch.Tensor) -> _Bytes | None:
    known = _KNOWN.get(id(tensor))
    if known is not None and known.tensor is tensor:
        return known
    if not tensor.is_contiguous() or tensor.device.type != "cpu" or not tensor.numel():
        return None
    rows = tensor.view(-1).view(torch.uint8).view(len(tensor), -1)
    known = _Bytes(tensor, rows, rows.view(-1).numpy().data, rows.shape[1])
    if len(_KNOWN) >= _MOST:
        _KNOWN.clear()
    _KNOWN[id(tensor)] = known
    return known


class Rows:
    """The bytes of some rows, wherever they lie (the form of scattered buffer that `wire` takes)."""

    __slots__ = ("_bytes", "_index")

    def __init__(self, known: _Bytes, index: np.ndarray) -> None:
        self._bytes, self._index = known, index

    def __len__(self) -> int:
        return len(self._index) * self._bytes.width

    @property
    def width(self) -> int:
        """Bytes of a row."""
        return self._bytes.width

    def part(self, first: int, last: int) -> Rows:
        """Some of the rows."""
        return Rows(self._bytes, self._index[first:last])

    def pieces(self) -> list[memoryview]:
        """A view of each row."""
        flat, width = self._bytes.flat, self._bytes.width
        return [flat[at : at + width] for at in (self._index * width).tolist()]

    def spans(self, skipped: int) -> np.ndarray:
        """(address, bytes) of each row, but for so many bytes at the front."""
        width = self._bytes.width
        first, within = divmod(skipped, width)
        index = self._index[first:]
        found = np.empty((len(index), 2), np.uintp)
        np.multiply(index, width, out=found[:, 0], casting="unsafe")
        found[:, 0] += self._bytes.rows.data_ptr()
        found[:, 1] = width
        found[0, 0] += within
        found[0, 1] -= within
        return found

    def gather(self, memory: np.ndarray) -> None:
        """Put the rows together in memory of their size."""
        out = torch.from_numpy(memory).view(len(self._index), self._bytes.width)
        torch.index_select(self._bytes.rows, 0, torch.from_numpy(self._index), out=out)


class Loose:
    """The bytes of samples that are tensors of their own."""

    __slots__ = ("_samples", "_shape", "width")

    def __init__(self, samples: Sequence[torch.Tensor], shape: torch.Size, width: int) -> None:
        self._samples, self._shape, self.width = samples, shape, width

    def __len__(self) -> int:
        return len(self._samples) * self.width

    def part(self, first: int, last: int) -> Loose:
        """Some of the samples."""
        return Loose(self._samples[first:last], self._shape, self.width)

    def gather(self, memory: np.ndarray) -> None:
        """Put the samples together in memory of their size. DataError where they are not alike."""
        samples, shape = self._samples, self._shape
        if samples[0].shape != shape:  # torch would stack them and forget about `out`
            raise DataError(f"samples of shape {tuple(samples[0].shape)} after some of {tuple(shape)}")
        out = torch.from_numpy(memory).view(samples[0].dtype).view(len(samples), *shape)
        try:
            torch.stack(samples, out=out)  # type: ignore[arg-type]
        except RuntimeError as error:  # one of another shape, on a GPU, sparse, with a gradient
            raise DataError(f"samples that do not fit together: {error}") from error


def loose_of(rows: LooseRows) -> Loose | None:
    """The bytes of loose samples; None where they cannot be put together without looking at each."""
    first = rows.samples[0]
    if first.layout is not torch.strided or first.device.type != "cpu" or first.is_quantized:
        return None
    return Loose(rows.samples, first.shape, first.nbytes)


def rows_of(stored: StoredRows) -> Rows | None:
    """The bytes of stored rows; None where they have to be gathered first."""
    known = _bytes_of(stored.tensor)
    return None if known is None else Rows(known, stored.ids)


def gathered(buffer: memoryview | Rows | Loose) -> memoryview:
    """A buffer in one piece."""
    if isinstance(buffer, memoryview):
        return buffer
    memory = np.empty(len(buffer), np.uint8)
    buffer.gather(memory)
    return memory.data


def settled(buffer: memoryview | Rows | Loose, least: int) -> memoryview | Rows:
    """A buffer as it goes into a socket: in one piece, but for rows of at least so many bytes, which stay."""
    return buffer if isinstance(buffer, Rows) and buffer.width >= least else gathered(buffer)


def beginning(buffer: memoryview | Rows | Loose, size: int) -> memoryview:
    """The first bytes of a buffer, about `size` of them, in one piece."""
    if isinstance(buffer, memoryview):
        return buffer[:size]
    return gathered(buffer.part(0, -(-size // buffer.width)))


def in_memory(batch: object) -> bool:
    """Whether none of the rows of a batch lie in a file."""
    return not any(stored.mapped for stored in values_in(batch, StoredRows))


def row_bytes(batch: object) -> int:
    """Bytes of the longest row of a batch of stored rows; 0 where some of them cannot be sent from where they lie."""
    if isinstance(batch, StoredRows):
        known = _bytes_of(batch.tensor)
        return 0 if known is None else known.width
    parts = list(batch.values()) if isinstance(batch, dict) else list(batch) if isinstance(batch, tuple) else []
    widths = [row_bytes(part) for part in parts]
    return max(widths) if widths and all(widths) else 0
