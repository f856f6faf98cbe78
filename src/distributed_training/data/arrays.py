"""Datasets whose samples lie in arrays: a batch is one gather per array, with no Python per sample."""

from __future__ import annotations

import hashlib
import mmap
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from distributed_training.data.base import Dataset, StoredRows
from distributed_training.runtime.errors import DataError

Arrays = Sequence[Any] | Mapping[str, Any]


class ArrayDataset(Dataset):
    """Samples in NumPy arrays (also memory-mapped) or tensors of equal length, as a tuple or a dict of them.

    With one array a batch is that tensor, with a tuple it is a tuple, with a dict a dict.
    """

    def __init__(self, arrays: Any, *, num_classes: int | None = None, name: str = "arrays") -> None:
        self.name = name
        self.num_classes = num_classes
        self._kind = "dict" if isinstance(arrays, Mapping) else "tuple" if isinstance(arrays, (tuple, list)) else "one"
        named = (
            arrays.items() if isinstance(arrays, Mapping) else enumerate(arrays if self._kind == "tuple" else [arrays])
        )
        given = {str(key): value for key, value in named}
        self._tensors = {key: _as_tensor(value, f"{name}[{key}]") for key, value in given.items()}
        self._in_files = any(map(_is_mapped, given.values()))
        lengths = {key: len(t) for key, t in self._tensors.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(f"{name}: arrays differ in length: {lengths}; every sample needs a row in each")
        self._length = next(iter(lengths.values()), 0)
        self.sample_bytes = sum(t[:1].nbytes for t in self._tensors.values())
        self.alone = type(self).fetch is ArrayDataset.fetch  # a subclass may make something else of them

    def __len__(self) -> int:
        return self._length

    def fetch(self, ids: np.ndarray) -> Any:
        index = torch.from_numpy(ids)
        if self._kind == "dict":
            return {key: gather_rows(t, index) for key, t in self._tensors.items()}
        rows = tuple([gather_rows(t, index) for t in self._tensors.values()])
        return rows if self._kind == "tuple" else rows[0]

    def rows(self, ids: np.ndarray) -> Any:
        if type(self).fetch is not ArrayDataset.fetch:  # a subclass makes something else of them
            return None
        stored = {key: StoredRows(t, ids, self._in_files) for key, t in self._tensors.items()}
        if self._kind == "dict":
            return stored
        return tuple(stored.values()) if self._kind == "tuple" else next(iter(stored.values()))

    def fingerprint(self) -> str:
        return fingerprint_of(self.name, {key: _as_array(t) for key, t in self._tensors.items()})


def _is_mapped(value: Any) -> bool:
    """Whether values lie in a file, which is read where they are looked at."""
    while isinstance(value, np.ndarray):
        if isinstance(value, np.memmap):
            return True
        value = value.base
    return isinstance(value, mmap.mmap)


def _as_tensor(value: Any, name: str) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        tensor = value.detach()
    else:
        array = np.asarray(value) if not isinstance(value, np.memmap) else value
        if not array.dtype.isnative or any(stride < 0 for stride in array.strides):  # torch takes neither
            array = array.astype(array.dtype.newbyteorder("="), order="C")
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*not writable")  # we only ever read
                tensor = torch.from_numpy(array)
        except (TypeError, ValueError):
            raise DataError(
                f"{name}: values of type {array.dtype} cannot become tensors; convert them to numbers"
            ) from None
    if tensor.ndim == 0:
        raise DataError(f"{name}: a single value, not an array with a row for each sample")
    return tensor


UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


def gather_rows(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows by their numbers, on the tensor's device."""
    # index_select is the fastest, but torch has it for bytes only among the unsigned types.
    return tensor[index] if tensor.dtype in UNSIGNED else tensor.index_select(0, index)


def _as_array(tensor: torch.Tensor) -> np.ndarray:
    # NumPy has no bfloat16: its bits are as good for a hash.
    return tensor.view(torch.int16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


_WHOLE = 16 * 2**20  # arrays up to this many bytes are hashed whole, of larger ones evenly spread rows
_ROWS = 1024


def fingerprint_of(name: str, arrays: Mapping[str, np.ndarray]) -> str:
    """Hash of names, shapes, types and content: all of it for small arrays, evenly spread rows of large ones."""
    digest = hashlib.sha256(name.encode())
    for key in sorted(arrays):
        array = arrays[key]
        digest.update(f"{key}:{array.shape}:{array.dtype.str}".encode())
        if array.nbytes > _WHOLE:
            array = array[np.unique(np.linspace(0, len(array) - 1, _ROWS).astype(np.int64))]
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]
