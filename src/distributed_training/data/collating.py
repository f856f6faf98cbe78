"""Samples put together into batches: what torch's `default_collate` does, quicker for the usual kinds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from distributed_training.data.base import LooseRows
from distributed_training.data.placing import ORDINARY, Memory

Stack = Callable[[Sequence[Tensor]], Any]
_dtype_of = attrgetter("dtype")
_NUMBERS: dict[type, type] = {int: np.int64, bool: np.bool_, float: np.float64}
_TROUBLE = (RuntimeError, ValueError, TypeError, AttributeError, OverflowError)


class UnusualError(Exception):
    """Samples that only torch's own function can put together, or say why not."""


def collate_samples(rows: list[Any]) -> Any:
    """What torch's `default_collate` makes of samples, without its checks of each of them for the usual kinds."""
    try:
        return _of_columns(rows, [_column(values, _stacked) for values in _columns(rows, rows[0])])
    except UnusualError:
        return default_collate(rows)


def loose_samples(rows: list[Any]) -> Any:
    """The same with `LooseRows` in place of tensors that would have to be stacked; None for all but the usual kinds."""
    try:
        return _of_columns(rows, [_column(values, _loose) for values in _columns(rows, rows[0])])
    except UnusualError:
        return None


class BlockOfSteps:
    """The rows of several steps, put together step by step in memory that all of them share.

    A dataset may use the memory of its samples again once they are a batch: so the rows of a step are put together
    before a sample of the next one is asked for, as torch's own loader does.
    """

    def __init__(self, rows: int, memory: Memory = ORDINARY) -> None:
        self._rows, self._memory = rows, memory
        self._columns: list[_TensorColumn | _NumberColumn] | None = None
        self._first: Any = None
        self._unusual = False

    def put(self, at: int, rows: list[Any]) -> None:
        """These samples are the rows from `at` on. To begin with the first ones again is to begin anew."""
        if at == 0:
            self._unusual = False
        if self._unusual:
            return
        try:
            if self._columns is None:
                self._first = rows[0]
            columns = _columns(rows, self._first)
            if self._columns is None:
                self._columns = [self._column(values) for values in columns]
            for column, values in zip(self._columns, columns, strict=True):
                column.put(at, values)
        except (UnusualError, *_TROUBLE):
            self._unusual = True

    def _column(self, values: Sequence[Any]) -> _TensorColumn | _NumberColumn:
        few, kind = _column(values[:2], _stacked), type(values[0])
        room = self._memory.empty((self._rows, *few.shape[1:]), dtype=few.dtype)
        if kind in _NUMBERS:
            return _NumberColumn(room, kind)
        if self._memory.plain or few.is_contiguous():
            return _TensorColumn(room)
        # Stacked by torch, samples of other strides (channels last) may give a batch of such strides.
        room = room.as_strided(room.shape, (few[0].numel(), *few.stride()[1:]))
        return _TensorColumn(room, torch.as_tensor(values[0]).stride())

    def batch(self) -> Any:
        """All rows as one batch; None where only torch's own function can put some of them together."""
        if self._unusual or self._columns is None:
            return None
        return _of_columns([self._first], [column.tensor for column in self._columns])


class _TensorColumn:
    """What is not a plain number. What would not be the same in this memory is an error of one kind or another."""

    def __init__(self, tensor: Tensor, stride: tuple[int, ...] | None = None) -> None:
        """`stride` of each sample, where it matters."""
        self.tensor, self._dtypes, self._stride = tensor, {tensor.dtype}, stride

    def put(self, at: int, values: Sequence[Any]) -> None:
        kind, into = type(values[0]), self.tensor[at : at + len(values)]
        if kind is np.ndarray:
            values = [torch.as_tensor(value) for value in values]
        elif kind is not Tensor:
            values = [_column(values, _stacked)]
            into = into[None]
        # torch would make another tensor of other shapes, and turn other types into this one.
        if values[0].shape != into.shape[1:] or set(map(_dtype_of, values)) != self._dtypes:
            raise UnusualError
        if self._stride is not None and set(map(Tensor.stride, values)) != {self._stride}:
            raise UnusualError
        if torch.stack(values, out=into) is not into:  # type: ignore[arg-type]
            raise UnusualError  # a subclass made something of its own


class _NumberColumn:
    """Numbers of Python's of one kind."""

    def __init__(self, tensor: Tensor, kind: type) -> None:
        self.tensor, self._kinds, self._numbers = tensor, {kind}, tensor.numpy()

    def put(self, at: int, values: Sequence[Any]) -> None:
        if set(map(type, values)) != self._kinds:
            raise UnusualError
        self._numbers[at : at + len(values)] = values


def _columns(rows: list[Any], like: Any) -> list[Sequence[Any]]:
    """What stands in the same place of each sample, in the order of the one that they are to be `like`; as with torch
    the first sample says what they are."""
    first = rows[0]
    try:
        if type(first) is type(like) is tuple:
            return [*zip(*rows, strict=True)]
        if type(first) is type(like) is dict and first.keys() == like.keys():
            return [[row[key] for row in rows] for key in like]
    except (ValueError, KeyError, TypeError, IndexError):
        pass
    raise UnusualError


def _of_columns(rows: list[Any], columns: list[Any]) -> Any:
    return dict(zip(rows[0], columns)) if type(rows[0]) is dict else columns


def _column(values: Sequence[Any], stack: Stack) -> Any:
    try:
        if type(values[0]) is Tensor:
            return stack(values)
        kinds = set(map(type, values))
        if kinds == {np.ndarray}:
            return stack([torch.as_tensor(value) for value in values])
        if len(kinds) == 1 and (dtype := _NUMBERS.get(*kinds)) is not None:
            return torch.from_numpy(np.array(values, dtype))  # `torch.tensor` takes two or three times as long
        if len(kinds) == 1 and issubclass(kinds.pop(), np.generic) and not isinstance(values[0], (str, bytes)):
            return torch.as_tensor(values)
    except _TROUBLE as error:
        raise UnusualError from error
    raise UnusualError


def _stacked(values: Sequence[Tensor]) -> Tensor:
    return torch.stack(values)  # type: ignore[arg-type]


def _loose(values: Sequence[Tensor]) -> LooseRows:
    """To be stacked later, which keeps the type only where all have the same."""
    if set(map(type, values)) != {Tensor} or len(set(map(_dtype_of, values))) != 1:
        raise UnusualError
    return LooseRows(values)
