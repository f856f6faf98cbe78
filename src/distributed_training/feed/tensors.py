"""Torch tensors as the bytes that travel, and back, without copying either way."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from distributed_training.data.base import LooseRows, StoredRows
from distributed_training.feed.rows import loose_of, rows_of
from distributed_training.runtime.errors import DataError
from distributed_training.wire.dtypes import BY_NAME, DType
from distributed_training.wire.layouts import as_numpy
from distributed_training.wire.tensors import Origin, RawTensor

_NAMES: dict[torch.dtype, str] = {
    getattr(torch, name): name for name in BY_NAME if isinstance(getattr(torch, name, None), torch.dtype)
}
_TYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in _NAMES.items()}
_EMPTY = memoryview(b"")
_TENSOR = Origin.TENSOR.value


def as_raw(item: Any) -> RawTensor | None:
    """A tensor as bytes. The memory is the tensor's own, unless it is not contiguous or not on the CPU."""
    if isinstance(item, StoredRows):
        return _rows_as_raw(item)
    if isinstance(item, LooseRows):
        return _loose_as_raw(item)
    if not isinstance(item, torch.Tensor):
        return None
    name = _NAMES.get(item.dtype)
    try:  # nearly always: a plain tensor on the CPU
        array = item.numpy()
        return RawTensor(name, array.shape, array.data.cast("B"))  # type: ignore[arg-type]
    except (TypeError, RuntimeError, ValueError, BufferError):
        return _as_raw(item, name)


def _rows_as_raw(item: StoredRows) -> RawTensor | None:
    rows = rows_of(item)
    if rows is None:
        return None
    shape = (len(item.ids), *item.tensor.shape[1:])
    return RawTensor(_NAMES[item.tensor.dtype], shape, rows)  # type: ignore[arg-type]


def _loose_as_raw(item: LooseRows) -> RawTensor:
    first = item.samples[0]
    loose, name = loose_of(item), _NAMES.get(first.dtype)
    if loose is None or name is None:  # put together, they are looked at one by one
        raise DataError(f"samples of {first.dtype} on {first.device} have to be stacked first")
    return RawTensor(name, (len(item.samples), *first.shape), loose)  # type: ignore[arg-type]


def _as_raw(item: torch.Tensor, name: str | None) -> RawTensor | None:
    """The same for what NumPy cannot look at as it is."""
    if name is None or item.layout is not torch.strided:
        return None  # sparse and quantized ones: the caller says what it is and that it cannot travel
    tensor = item.detach()
    if tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg().cpu()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    if not tensor.numel():
        return RawTensor(name, tuple(tensor.shape), _EMPTY)
    flat = tensor.view(-1) if tensor.ndim != 1 else tensor
    if BY_NAME[name].numpy is None:
        flat = flat.view(torch.uint8)
    return RawTensor(name, tuple(tensor.shape), flat.numpy().view(np.uint8).data)


def as_tensor(dtype: DType, shape: tuple[int, ...], memory: memoryview, origin: int) -> Any:
    """A view of received memory: a tensor where a tensor was sent, else what NumPy has."""
    if origin != _TENSOR:
        return as_numpy(dtype, shape, memory, origin)
    known = _TYPES[dtype.name]
    if not len(memory):
        return torch.empty(shape, dtype=known)
    if dtype.numpy is not None:
        return torch.from_numpy(np.ndarray(shape, dtype.numpy, memory))  # quicker than the next line
    return torch.frombuffer(memory, dtype=known).view(shape)
