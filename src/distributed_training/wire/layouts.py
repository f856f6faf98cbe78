"""A batch put together again from its tree, numbers, values and buffers.

A tree from the peer is checked once and compiled into nested functions with all positions baked in, so that
restoring a batch of a known layout is short. Sizes are computed from the tree and the numbers, and compared with the
payload, before memory is taken for it. No class is ever looked up or imported by a name from the peer: named tuples
become named tuples made here and dataclasses become dicts, unless the caller hands in classes of its own.
"""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from collections.abc import Callable, Mapping
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from distributed_training.wire.dtypes import BY_CODE, DType
from distributed_training.wire.errors import PeerError, Reason
from distributed_training.wire.limits import MAX_DEPTH, MAX_DIMENSIONS, MAX_FIELDS, MAX_LEAVES
from distributed_training.wire.tensors import ERRORS, Column, Node, Origin, RawTensor, is_name

Make = Callable[[DType, tuple[int, ...], memoryview, int], Any]
"""Makes a tensor of (type, shape, memory, origin), without copying the memory."""
Types = Mapping[str, type]
"""Classes by name for the named tuples and dataclasses of a batch; their fields must be those that arrive."""

_MAX_DIM = 2**40
_MAX_BYTES = 2**62
_INT = {int}


def as_numpy(dtype: DType, shape: tuple[int, ...], memory: memoryview, origin: int) -> Any:
    """A view as a NumPy array; a RawTensor where NumPy has no such type."""
    if dtype.numpy is None:
        return RawTensor(dtype.name, shape, memory, Origin(origin))
    array: np.ndarray = np.ndarray(shape, dtype.numpy, memory)
    return array[()] if origin == Origin.SCALAR else array


class _Parts(NamedTuple):
    """What a batch is put together from."""

    dims: list[int]
    values: list[Any]
    buffers: list[memoryview]
    make: Make
    types: Types


_Build = Callable[[_Parts], Any]


class Layout:
    """One shape of nesting, checked and compiled."""

    __slots__ = ("_build", "_last", "_rows", "_sizers", "dim_count", "value_count")

    def __init__(self, tree: Any) -> None:
        compiler = _Compiler()
        self._build: _Build = compiler.node(tree, 0)
        self._sizers: list[tuple[int, int, int]] = compiler.sizers
        self.dim_count: int = compiler.dims
        self.value_count: int = compiler.values
        self._rows: list[int] | None = compiler.rows if compiler.only_rows else None
        self._last: tuple[list[int], list[int]] | None = None

    def sizes(self, dims: list[int]) -> list[int]:
        """Bytes of each buffer. Most batches have the numbers of the one before."""
        if self._last is None or self._last[0] != dims or set(map(type, dims)) != _INT:  # for True == 1 == 1.0
            self._last = (dims, self._checked_sizes(dims))
        return self._last[1]

    def _checked_sizes(self, dims: list[int]) -> list[int]:
        if len(dims) != self.dim_count:
            raise PeerError(f"a batch with {len(dims)} numbers where its layout has {self.dim_count}")
        for dim in dims:
            if type(dim) is not int or not 0 <= dim <= _MAX_DIM:
                raise PeerError(f"a batch with {dim!r} for a size")
        sizes = []
        for itemsize, start, end in self._sizers:
            size = itemsize * prod(dims[start:end])
            # An empty tensor may still have sides whose product overflows.
            if size > _MAX_BYTES or (not size and itemsize * prod(d or 1 for d in dims[start:end]) > _MAX_BYTES):
                raise PeerError(f"a tensor of shape {dims[start:end]}", Reason.LIMIT)
            sizes.append(size)
        return sizes

    def has_rows(self, dims: list[int], rows: int) -> bool:
        """Whether this is nothing but tensors of so many rows each, in lists, tuples and dicts."""
        return bool(self._rows) and all(dims[at] == rows for at in self._rows or ())

    def restore(self, dims: list[int], values: list[Any], buffers: list[memoryview], make: Make, types: Types) -> Any:
        """The batch. Its tensors are views of the buffers."""
        return self._build(_Parts(dims, values, buffers, make, types))


class _Compiler:
    """Checks a tree and turns it into functions."""

    def __init__(self) -> None:
        self.sizers: list[tuple[int, int, int]] = []
        self.dims = self.values = self.leaves = self.collections = 0
        self.rows: list[int] = []
        """Which of the numbers are the first side of a tensor."""
        self.only_rows = True

    def node(self, tree: Any, depth: int) -> _Build:
        """One node and all below it."""
        if type(tree) is not list or not tree or type(tree[0]) is not int:
            raise PeerError("a batch whose layout is no tree")
        tag = tree[0]
        if tag <= Node.COLUMN:
            self.leaves += 1
            leaf = _LEAVES.get((tag, len(tree)))
            if leaf is None or self.leaves > MAX_LEAVES:
                raise PeerError(f"a layout with an unknown node {tree[:4]!r}, or more than {MAX_LEAVES} leaves")
            self.only_rows = self.only_rows and tag == Node.TENSOR
            return leaf(self, *tree[1:])
        self.collections += 1
        if self.collections > MAX_LEAVES or depth >= MAX_DEPTH:
            raise PeerError(f"a layout of {self.collections} collections, {depth} deep", Reason.LIMIT)
        if tag == Node.LIST or tag == Node.TUPLE:
            children = [self.node(child, depth + 1) for child in tree[1:]]
            return _tuple(children) if tag == Node.TUPLE else _list(children)
        if tag == Node.DICT and len(tree) >= 2:
            return self._dict(tree[1], [self.node(child, depth + 1) for child in tree[2:]])
        self.only_rows = False
        if tag in (Node.NAMED, Node.RECORD) and len(tree) >= 3:
            return self._record(tag, tree[1], tree[2], [self.node(child, depth + 1) for child in tree[3:]])
        raise PeerError(f"a layout with a node of unknown kind {tag}")

    def _dict(self, keys: Any, children: list[_Build]) -> _Build:
        if type(keys) is not list or len(keys) != len(children) or not all(type(key) in (str, int) for key in keys):
            raise PeerError("a layout with a dict whose keys and values do not match")
        if len(set(keys)) != len(keys):
            raise PeerError("a layout with a dict that has a key twice")
        pairs = list(zip(keys, children))
        return lambda parts: {key: child(parts) for key, child in pairs}

    def _record(self, tag: int, name: Any, fields: Any, children: list[_Build]) -> _Build:
        if (
            type(fields) is not list
            or len(fields) > MAX_FIELDS
            or not all(map(is_name, [name, *fields]))
            or len(set(fields)) != len(children)
        ):
            raise PeerError("a layout with a record whose names make no sense")
        if len(fields) != len(children):
            raise PeerError("a layout with a record that has a field twice")
        names = tuple(fields)
        if tag == Node.RECORD:
            return lambda parts: _record_class(parts.types.get(name), names)(
                **{field: child(parts) for field, child in zip(names, children)}
            )
        return lambda parts: _named_class(parts.types.get(name), name, names)(*[child(parts) for child in children])

    def _buffer(self, itemsize: int, dims: int) -> tuple[int, int]:
        """Note a buffer of so many elements; its index and that of its first number."""
        start = self.dims
        self.sizers.append((itemsize, start, start + dims))
        self.dims += dims
        return len(self.sizers) - 1, start

    def tensor(self, code: Any, dimensions: Any, origin: Any) -> _Build:
        dtype = BY_CODE.get(code) if type(code) is int else None
        if dtype is None:
            raise PeerError(f"a tensor of unknown type {code!r}; both sides need the same release")
        if type(dimensions) is not int or not 0 <= dimensions <= MAX_DIMENSIONS:
            raise PeerError(f"a tensor of {dimensions!r} dimensions")
        if type(origin) is not int or not 0 <= origin <= 2 or (origin == Origin.SCALAR and dimensions):
            raise PeerError(f"a tensor of unknown origin {origin!r}")
        known, own = dtype, origin
        index, start = self._buffer(dtype.size, dimensions)
        end = start + dimensions
        self.rows.append(start)
        self.only_rows = self.only_rows and dimensions > 0 and origin == Origin.TENSOR
        if dtype.name == "bool":
            return lambda p: p.make(known, tuple(p.dims[start:end]), _truth(p.buffers[index]), own)
        return lambda p: p.make(known, tuple(p.dims[start:end]), p.buffers[index], own)

    def value(self) -> _Build:
        at = self.values
        self.values += 1
        return lambda p: p.values[at]

    def text(self) -> _Build:
        index, _ = self._buffer(1, 1)
        return lambda p: _decode(p.buffers[index])

    def bytes_(self) -> _Build:
        index, _ = self._buffer(1, 1)
        return lambda p: bytes(p.buffers[index])

    def column(self, container: Any, kind: Any) -> _Build:
        if container not in (0, 1) or kind not in (0, 1, 2, 3) or type(container) is not int or type(kind) is not int:
            raise PeerError(f"a layout with an unknown column ({container!r}, {kind!r})")
        whole = tuple if container else list
        if kind in (Column.INT, Column.FLOAT):
            index, _ = self._buffer(8, 1)
            dtype = "<i8" if kind == Column.INT else "<f8"
            return lambda p: whole(np.frombuffer(p.buffers[index], dtype).tolist())
        index, _ = self._buffer(4, 1)
        self._buffer(1, 1)
        convert = _decode if kind == Column.TEXT else bytes
        return lambda p: whole(_pieces(p.buffers[index], p.buffers[index + 1], convert))


_LEAVES: dict[tuple[int, int], Callable[..., _Build]] = {
    (Node.TENSOR, 4): _Compiler.tensor,
    (Node.VALUE, 1): _Compiler.value,
    (Node.TEXT, 1): _Compiler.text,
    (Node.BYTES, 1): _Compiler.bytes_,
    (Node.COLUMN, 3): _Compiler.column,
}


def _tuple(children: list[_Build]) -> _Build:
    return lambda parts: tuple([child(parts) for child in children])


def _list(children: list[_Build]) -> _Build:
    return lambda parts: [child(parts) for child in children]


def _truth(memory: memoryview) -> memoryview:
    """A truth value is 0 or 1 in memory; anything else is undefined behaviour in torch."""
    if len(memory) and np.frombuffer(memory, np.uint8).max() > 1:
        raise PeerError("a tensor of truth values with a byte that is neither 0 nor 1")
    return memory


def _decode(memory: memoryview) -> str:
    try:
        return str(memory, "utf-8", ERRORS)
    except UnicodeDecodeError as error:
        raise PeerError(f"a string that is not UTF-8: {error.reason}") from None


def _pieces(lengths: memoryview, joined: memoryview, convert: Callable[[memoryview], Any]) -> list[Any]:
    """Cut a column of strings or bytes."""
    ends = np.frombuffer(lengths, "<u4").cumsum(dtype=np.uint64).tolist()
    if (ends[-1] if ends else 0) != len(joined):
        raise PeerError("a list of strings whose lengths do not add up")
    return [convert(joined[start:end]) for start, end in zip([0, *ends], ends)]


def _record_class(given: type | None, fields: tuple[str, ...]) -> Callable[..., Any]:
    """The caller's dataclass of that name if its fields are these; else a dict."""
    if given is None or not dataclasses.is_dataclass(given):
        return dict
    return given if {field.name for field in dataclasses.fields(given) if field.init} == set(fields) else dict


def _named_class(given: type | None, name: str, fields: tuple[str, ...]) -> Callable[..., Any]:
    """The caller's named tuple of that name if its fields are these; else one made here."""
    return given if given is not None and getattr(given, "_fields", None) == fields else _made_class(name, fields)


@lru_cache(maxsize=64)
def _made_class(name: str, fields: tuple[str, ...]) -> Callable[..., Any]:
    try:
        return namedtuple(name, fields, rename=True)
    except (ValueError, SyntaxError):
        raise PeerError(f"a named tuple {name!r} that cannot be one") from None
