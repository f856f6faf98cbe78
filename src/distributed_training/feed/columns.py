"""Samples of nested batches as rows of columns, to be kept one by one and put together again in any order.

A batch is taken apart into its leaves: tensors and arrays with a row a sample, and lists of bytes or texts, one a
sample. A tensor's rows lie in one matrix of bytes. What has no such rows cannot be kept.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distributed_training.runtime.errors import DataError

Shape = list[Any]
"""How a batch is built, in lists, texts and numbers: equal for batches whose samples can be mixed."""

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class Unkept(DataError):
    """A batch has parts that are no rows of samples."""


def take_apart(data: Any, rows: int) -> tuple[Shape, list[Any]]:
    """(how it is built, its leaves in order) of a batch of so many samples. Raises Unkept."""
    leaves: list[Any] = []
    return _describe(data, rows, leaves), leaves


def _describe(data: Any, rows: int, leaves: list[Any]) -> Shape:
    if isinstance(data, (Tensor, np.ndarray)):
        if not data.ndim or len(data) != rows:
            raise Unkept(f"a tensor of shape {tuple(data.shape)} has not a row for each of {rows} samples")
        leaves.append(data)
        kind = "tensor" if isinstance(data, Tensor) else "array"
        return [kind, str(data.dtype).removeprefix("torch."), list(data.shape[1:])]
    if isinstance(data, (list, tuple)) and not hasattr(data, "_fields"):
        name = "list" if isinstance(data, list) else "tuple"
        kinds = {type(value) for value in data}
        if len(data) == rows and (kinds == {bytes} or kinds == {str}):
            leaves.append(data)
            return ["bytes" if kinds == {bytes} else "text", name]
        return [name, *[_describe(value, rows, leaves) for value in data]]
    if type(data) is dict:
        keys = [list(map(str, data)), [type(key) is int for key in data]]
        return ["dict", keys, *[_describe(value, rows, leaves) for value in data.values()]]
    raise Unkept(f"a batch holds a {type(data).__name__}, which has not a row for each sample")


def put_together(shape: Shape, leaves: Iterator[Any]) -> Any:
    """A batch from its leaves, in order."""
    kind = shape[0]
    if kind in ("tensor", "array"):
        return next(leaves)
    if kind in ("bytes", "text"):
        values = next(leaves)
        return values if shape[1] == "list" else tuple(values)
    if kind == "dict":
        names, numbers = shape[1]
        keys = [int(name) if number else name for name, number in zip(names, numbers)]
        return {key: put_together(part, leaves) for key, part in zip(keys, shape[2:])}
    parts = [put_together(part, leaves) for part in shape[1:]]
    return parts if kind == "list" else tuple(parts)


def leaf_shapes(shape: Shape) -> Iterator[Shape]:
    """What is said of each leaf, in order."""
    if shape[0] in ("tensor", "array", "bytes", "text"):
        yield shape
    else:
        for part in shape[2:] if shape[0] == "dict" else shape[1:]:
            yield from leaf_shapes(part)


class Column(ABC):
    """One leaf of every sample. Rows that were put are never changed; any thread may take them."""

    @abstractmethod
    def put(self, ids: np.ndarray, leaf: Any, chosen: np.ndarray) -> None:
        """Keep the `chosen` rows of a leaf as those of these samples."""

    @abstractmethod
    def take(self, ids: np.ndarray, allocate: Callable[[int], memoryview]) -> Any:
        """The leaf of a batch of these samples, in memory that `allocate` gives where that makes sense."""

    @abstractmethod
    def piece(self, sample: int) -> memoryview:
        """The bytes of one sample, for a hash."""

    def close(self) -> None:  # noqa: B027 (for those with files)
        """Nothing more will be put or taken."""


class Matrix(Column):
    """Rows of a tensor or array as rows of bytes, in memory that is given: plain, or mapped to a file."""

    def __init__(self, shape: Shape, memory: np.ndarray) -> None:
        self._array, self._sides = shape[0] == "array", tuple(shape[2])
        self._numpy = np.dtype(shape[1]) if self._array else None
        self._torch = None if self._array else _DTYPES[shape[1]]
        self._memory, self._rows = memory, torch.from_numpy(memory)

    def put(self, ids: np.ndarray, leaf: Any, chosen: np.ndarray) -> None:
        self._rows[torch.from_numpy(ids)] = as_bytes(leaf)[torch.from_numpy(chosen)]

    def take(self, ids: np.ndarray, allocate: Callable[[int], memoryview]) -> Any:
        width = self._rows.shape[1]
        out = torch.frombuffer(allocate(len(ids) * width), dtype=torch.uint8).view(len(ids), width)
        torch.index_select(self._rows, 0, torch.from_numpy(ids), out=out)
        if self._numpy is not None:
            return out.numpy().reshape(-1).view(self._numpy).reshape(len(ids), *self._sides)
        assert self._torch is not None
        return out.view(-1).view(self._torch).view(len(ids), *self._sides)

    def piece(self, sample: int) -> memoryview:
        return self._memory[sample].data


def sample_sizes(shape: Shape, leaves: list[Any], rows: int) -> np.ndarray:
    """Bytes of each sample of a batch."""
    sizes = np.zeros(rows, np.int64)
    for leaf, values in zip(leaf_shapes(shape), leaves):
        if leaf[0] in ("tensor", "array"):
            sizes += row_width(leaf)
        else:
            sizes += np.array([len(value.encode() if leaf[0] == "text" else value) for value in values], np.int64)
    return sizes


def row_width(shape: Shape) -> int:
    """Bytes of a row of a tensor or array."""
    kind, name, sides = shape
    item = np.dtype(name).itemsize if kind == "array" else torch.empty((), dtype=_DTYPES[name]).element_size()
    return item * int(np.prod(sides, dtype=np.int64))


def as_bytes(leaf: Any) -> Tensor:
    """A leaf as rows of bytes."""
    tensor = torch.from_numpy(np.ascontiguousarray(leaf).view(np.uint8)) if isinstance(leaf, np.ndarray) else leaf
    return tensor.detach().contiguous().view(-1).view(torch.uint8).view(len(leaf), -1)


class Pieces(Column):
    """Bytes or texts of any length, in memory."""

    def __init__(self, shape: Shape) -> None:
        self._text = shape[0] == "text"
        self._kept: dict[int, bytes] = {}

    def put(self, ids: np.ndarray, leaf: Any, chosen: np.ndarray) -> None:
        for sample, row in zip(ids.tolist(), chosen.tolist()):
            self._kept[sample] = leaf[row].encode() if self._text else leaf[row]

    def take(self, ids: np.ndarray, allocate: Callable[[int], memoryview]) -> Any:
        found = [self._kept[sample] for sample in ids.tolist()]
        return [piece.decode() for piece in found] if self._text else found

    def piece(self, sample: int) -> memoryview:
        return memoryview(self._kept[sample])


def same_shape(one: Shape, other: Shape) -> bool:
    """Whether samples of two batches can be mixed."""
    return one is other or json.dumps(one) == json.dumps(other)


def cut_rows(data: Any, rows: slice, size: int) -> Any:
    """Some rows of a batch of `size` samples; what has no row for each sample stays whole."""
    if isinstance(data, (Tensor, np.ndarray)):
        return data[rows] if data.ndim and len(data) == size else data
    if isinstance(data, (list, tuple)):
        if len(data) == size and all(isinstance(value, (str, bytes, int, float)) for value in data):
            return data[rows]
        values = [cut_rows(value, rows, size) for value in data]
        return type(data)(*values) if hasattr(data, "_fields") else type(data)(values)
    if isinstance(data, Mapping):
        return {key: cut_rows(value, rows, size) for key, value in data.items()}
    return data
