"""A batch taken apart for sending: the shape of its nesting, and beside it numbers, short values and raw buffers.

A batch is any nesting of dicts, lists, tuples, named tuples and dataclasses with tensors, arrays, numbers, strings,
bytes and None at the leaves. Its nesting (its *tree*) is nearly always the same from batch to batch, so it is sent
once and referred to by number after that; `layouts.py` reads it back. The memory of tensors is never copied here,
unless it is not contiguous.
"""

from __future__ import annotations

import dataclasses
import keyword
import numbers
import unicodedata
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from distributed_training.runtime.errors import DataError
from distributed_training.wire.dtypes import BY_NAME, BY_NUMPY
from distributed_training.wire.limits import MAX_DEPTH, MAX_DIMENSIONS, MAX_FIELDS, MAX_ITEMS, MAX_LEAVES, SHORT

Tree = tuple[Any, ...]
Path = tuple[Any, ...] | None
"""Where in a batch something is: (path of what it is in, key), or (path, "", field). Words only for errors."""
ERRORS = "surrogatepass"  # names of files may hold lone surrogates


class Node(IntEnum):
    """First element of each node of a tree."""

    TENSOR = 0
    VALUE = 1
    TEXT = 2
    BYTES = 3
    COLUMN = 4
    LIST = 5
    TUPLE = 6
    DICT = 7
    NAMED = 8
    RECORD = 9


class Origin(IntEnum):
    """What a tensor was where it was sent, so that it becomes the same again."""

    TENSOR = 0
    ARRAY = 1
    SCALAR = 2


class Column(IntEnum):
    """A list of values of one kind, sent as one or two buffers instead of one by one."""

    TEXT = 0
    BYTES = 1
    INT = 2
    FLOAT = 3


class RawTensor(NamedTuple):
    """A tensor as bytes: what an adapter gives for its own kind of tensor, and what types without NumPy arrive as."""

    dtype: str
    shape: tuple[int, ...]
    memory: memoryview
    """Its elements in C order, little-endian, as a flat view of bytes."""
    origin: Origin = Origin.TENSOR


Adapter = Callable[[Any], RawTensor | None]
"""Turns a foreign object into a RawTensor; None where it is not one of its own."""


class Described(NamedTuple):
    """A batch taken apart."""

    tree: Tree
    dims: list[int]
    """Shapes and counts, in the order of the leaves."""
    values: list[Any]
    """Numbers, short strings and bytes, in the order of the leaves."""
    buffers: list[memoryview]
    """Everything else, in the order of the leaves."""


_INT64 = range(-(2**63), 2**63)
_INT = range(-(2**63), 2**64)
# As plain numbers: a tree is hashed for every batch, and members of an enum are slow at that.
_TENSOR, _COLUMN = Node.TENSOR.value, Node.COLUMN.value
_LIST, _TUPLE, _DICT = Node.LIST.value, Node.TUPLE.value, Node.DICT.value
_VALUE: Tree = (Node.VALUE.value,)
_TEXT: Tree = (Node.TEXT.value,)
_BYTES: Tree = (Node.BYTES.value,)
_EMPTY = memoryview(b"")


def describe(data: Any, adapt: Adapter | None = None) -> Described:
    """Take a batch apart. DataError names what cannot travel and where in the batch it is."""
    walk = _Walk(adapt)
    return Described(walk.node(data, 0, None), walk.dims, walk.values, walk.buffers)


class _Walk:
    """One walk over one batch."""

    __slots__ = ("adapt", "buffers", "collections", "dims", "leaves", "values")

    def __init__(self, adapt: Adapter | None) -> None:
        self.adapt = adapt
        self.dims: list[int] = []
        self.values: list[Any] = []
        self.buffers: list[memoryview] = []
        self.leaves = 0
        self.collections = 0

    def node(self, item: Any, depth: int, path: Path) -> Tree:
        """The tree of one object; its leaves are added to the lists."""
        kind = type(item)
        handler = _EXACT.get(kind)
        if handler is not None:
            return handler(self, item, depth, path)
        if self.adapt is not None and (raw := self.adapt(item)) is not None:
            return self.raw(raw, path)
        for base, handler in _GENERAL:
            if isinstance(item, base):
                return handler(self, item, depth, path)
        if dataclasses.is_dataclass(item) and not isinstance(item, type):
            names = [field.name for field in dataclasses.fields(item)]
            return self._record(Node.RECORD, item, names, depth, path)
        raise DataError(
            f"a batch holds an object of type {kind.__module__}.{kind.__qualname__} at {_where(path)}, which "
            "cannot be sent; return tensors, arrays, numbers, strings, bytes, None, or dicts, lists, tuples and "
            "dataclasses of them"
        )

    def leaf(self, path: Path) -> None:
        """Count one leaf."""
        self.leaves += 1
        if self.leaves > MAX_LEAVES:
            raise DataError(
                f"a batch has more than {MAX_LEAVES} tensors and values (at {_where(path)}); "
                "stack what is alike into tensors"
            )

    def raw(self, raw: RawTensor, path: Path) -> Tree:
        """A tensor of somebody else's library."""
        self.leaf(path)
        dtype = BY_NAME.get(raw.dtype)
        if dtype is None:
            raise DataError(f"a batch holds a tensor of type {raw.dtype} at {_where(path)}, which cannot be sent")
        self.dims += raw.shape
        self.buffers.append(raw.memory)
        return (_TENSOR, dtype.code, len(raw.shape), int(raw.origin))

    def array(self, item: np.ndarray, depth: int, path: Path, origin: int = Origin.ARRAY.value) -> Tree:
        """A NumPy array."""
        self.leaf(path)
        known = BY_NUMPY.get(item.dtype)
        if known is None:
            known = BY_NUMPY.get(item.dtype.newbyteorder("<"))
            if known is None or item.dtype.names is not None:
                raise DataError(
                    f"a batch holds an array of type {item.dtype} at {_where(path)}, which cannot be sent; "
                    "use numbers, or a list of strings"
                )
            item = item.astype(known.numpy)
        if item.ndim > MAX_DIMENSIONS:
            raise DataError(f"an array at {_where(path)} has {item.ndim} dimensions")
        self.dims += item.shape
        if not item.flags.c_contiguous:
            item = item.copy(order="C")
        self.buffers.append(item.reshape(-1).view(np.uint8).data if item.size else _EMPTY)
        return (_TENSOR, known.code, item.ndim, origin)

    def scalar(self, item: np.generic, depth: int, path: Path) -> Tree:
        """A number of NumPy's."""
        return self.array(np.asarray(item), depth, path, Origin.SCALAR.value)

    def value(self, item: Any, depth: int, path: Path) -> Tree:
        """None, a truth value or a float."""
        self.leaf(path)
        self.values.append(item)
        return _VALUE

    def integer(self, item: int, depth: int, path: Path) -> Tree:
        """A whole number."""
        if item not in _INT:
            raise DataError(f"the number {item} at {_where(path)} of a batch does not fit 64 bits")
        return self.value(item, depth, path)

    def text(self, item: str, depth: int, path: Path) -> Tree:
        """A string: short ones are values."""
        if len(item) <= SHORT:
            return self.value(item, depth, path)
        self.leaf(path)
        return self._blob(item.encode("utf-8", ERRORS), _TEXT)

    def bytes_(self, item: Any, depth: int, path: Path) -> Tree:
        """Bytes: short ones are values."""
        if len(item) <= SHORT and type(item) is bytes:
            return self.value(item, depth, path)
        self.leaf(path)
        return self._blob(item, _BYTES)

    def _blob(self, data: Any, tree: Tree) -> Tree:
        view = memoryview(data).cast("B")
        self.dims.append(len(view))
        self.buffers.append(view)
        return tree

    def sequence(self, item: Any, depth: int, path: Path) -> Tree:
        """A list, or a plain tuple."""
        if len(item) and (column := _column(item)) is not None:
            self.leaf(path)
            return self._column(item, column)
        is_tuple = isinstance(item, tuple)
        if is_tuple and hasattr(item, "_fields"):
            return self._record(Node.NAMED, item, list(item._fields), depth, path)
        self._deeper(item, depth, path)
        children = [self.node(child, depth + 1, (path, at)) for at, child in enumerate(item)]
        return (_TUPLE if is_tuple else _LIST, *children)

    def mapping(self, item: Mapping[Any, Any], depth: int, path: Path) -> Tree:
        """A dict; what is like one (a Hugging Face batch) becomes one."""
        self._deeper(item, depth, path)
        for key in item:
            if type(key) is not str and not (type(key) is int and key in _INT64):
                raise DataError(f"a dict at {_where(path)} of a batch has the key {key!r}; use strings or numbers")
        keys = tuple(item)
        return (_DICT, keys, *[self.node(item[key], depth + 1, (path, key)) for key in keys])

    def _record(self, node: Node, item: Any, names: list[str], depth: int, path: Path) -> Tree:
        self._deeper(names, depth, path)
        if len(names) > MAX_FIELDS:
            raise DataError(f"a {type(item).__name__} of {len(names)} fields at {_where(path)} of a batch; use a dict")
        children = [self.node(getattr(item, name), depth + 1, (path, "", name)) for name in names]
        name = type(item).__name__
        return (node.value, name if is_name(name) else "Record", tuple(names), *children)

    def _deeper(self, item: Any, depth: int, path: Path) -> None:
        self.collections += 1
        if self.collections > MAX_LEAVES:
            raise DataError(f"a batch has more than {MAX_LEAVES} collections (at {_where(path)}); stack what is alike")
        if depth >= MAX_DEPTH:
            raise DataError(f"a batch is nested deeper than {MAX_DEPTH} levels (at {_where(path)})")
        if len(item) > MAX_ITEMS // 2:
            raise DataError(
                f"a batch holds a collection of {len(item)} objects at {_where(path)}, more than "
                f"{MAX_ITEMS // 2}; stack them into a tensor, or make it a list of values of one kind"
            )

    def _column(self, item: Any, kind: Column) -> Tree:
        self.dims.append(len(item))
        if kind is Column.INT or kind is Column.FLOAT:
            numbers_ = np.array(item, dtype="<i8" if kind is Column.INT else "<f8")
            self.buffers.append(numbers_.view(np.uint8).data)
        else:
            parts = [part.encode("utf-8", ERRORS) for part in item] if kind is Column.TEXT else item
            joined = b"".join(parts)
            self.dims.append(len(joined))
            self.buffers.append(np.fromiter(map(len, parts), "<u4", len(parts)).view(np.uint8).data)
            self.buffers.append(memoryview(joined))
        return (_COLUMN, 1 if isinstance(item, tuple) else 0, kind.value)


def _where(path: Path) -> str:
    """A path as Python would write it."""
    words = ""
    while path is not None:
        words = (f".{path[2]}" if len(path) == 3 else f"[{path[1]!r}]") + words
        path = path[0]
    return words or "the top"


def is_name(name: Any) -> bool:
    """Whether this can be the name of a class or field, as Python itself would have it."""
    return (
        type(name) is str
        and len(name) <= 256
        and name.isidentifier()
        and not keyword.iskeyword(name)
        and unicodedata.is_normalized("NFKC", name)
    )


def _column(item: Any) -> Column | None:
    """The kind that all elements of a list or plain tuple have in common, where it can be sent as a column."""
    kind = _COLUMNS.get(type(item[0]))
    if kind is None or hasattr(item, "_fields") or len(set(map(type, item))) != 1:
        return None
    if kind is Column.INT and not (min(item) in _INT64 and max(item) in _INT64):
        return None
    return kind


_COLUMNS = {str: Column.TEXT, bytes: Column.BYTES, int: Column.INT, float: Column.FLOAT}
_Handler = Callable[[_Walk, Any, int, Path], Tree]
_EXACT: dict[type, _Handler] = {
    np.ndarray: _Walk.array,
    tuple: _Walk.sequence,
    list: _Walk.sequence,
    dict: _Walk.mapping,
    int: _Walk.integer,
    str: _Walk.text,
    bytes: _Walk.bytes_,
    float: _Walk.value,
    bool: _Walk.value,
    type(None): _Walk.value,
}
_GENERAL: list[tuple[type, _Handler]] = [
    (str, lambda walk, item, depth, path: walk.text(str(item), depth, path)),
    (bytes, lambda walk, item, depth, path: walk.bytes_(bytes(item), depth, path)),
    (np.generic, _Walk.scalar),
    (np.ndarray, lambda walk, item, depth, path: walk.array(np.asarray(item), depth, path)),
    (Mapping, _Walk.mapping),
    (tuple, _Walk.sequence),
    (list, _Walk.sequence),
    (bytearray, _Walk.bytes_),
    (memoryview, lambda walk, item, depth, path: walk.bytes_(bytes(item), depth, path)),
    (numbers.Integral, lambda walk, item, depth, path: walk.integer(int(item), depth, path)),
    (numbers.Real, lambda walk, item, depth, path: walk.value(float(item), depth, path)),
]
