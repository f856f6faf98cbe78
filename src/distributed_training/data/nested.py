"""Batches are nested tuples, lists and dicts of tensors; these walk them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

Kinds = type | tuple[type, ...]


def map_tensors(function: Callable[[Tensor], Any], data: Any) -> Any:
    """The same nesting with `function` applied to every tensor; anything else is passed through."""
    return map_values(function, data, Tensor)


def map_values(function: Callable[[Any], Any], data: Any, kinds: Kinds) -> Any:
    """The same for every value of these kinds, which may be tuples themselves."""
    if isinstance(data, kinds):
        return function(data)
    if isinstance(data, tuple):
        values = [map_values(function, value, kinds) for value in data]
        return type(data)(*values) if hasattr(data, "_fields") else tuple(values)
    if isinstance(data, list):
        return [map_values(function, value, kinds) for value in data]
    if isinstance(data, Mapping):  # Hugging Face batches are mappings too, and become plain dicts
        return {key: map_values(function, value, kinds) for key, value in data.items()}
    return data


def tensors_in(data: Any) -> Iterator[Tensor]:
    """Every tensor of a nesting, in order."""
    return values_in(data, Tensor)


def values_in(data: Any, kinds: Kinds) -> Iterator[Any]:
    """Every value of these kinds in a nesting, in order."""
    if isinstance(data, kinds):
        yield data
    elif isinstance(data, (tuple, list)):
        for value in data:
            yield from values_in(value, kinds)
    elif isinstance(data, Mapping):
        for value in data.values():
            yield from values_in(value, kinds)


def to_device(data: Any, device: torch.device) -> Any:
    """All tensors on `device`; copies from pinned memory do not wait, copies to the CPU do: its readers would not."""
    to_gpu = device.type != "cpu"
    return map_tensors(lambda t: t.to(device, non_blocking=to_gpu), data)


def batch_length(data: Any) -> int:
    """Number of samples: the first dimension of the first tensor that has one."""
    if isinstance(data, (tuple, list)) and data and isinstance(data[0], Tensor) and data[0].ndim:
        return len(data[0])
    for tensor in tensors_in(data):
        if tensor.ndim:
            return len(tensor)
    return 1


def split_batch(data: Any, size: int, parts: int) -> list[tuple[int, Any]]:
    """Cut a batch of `size` samples into `parts` micro-batches of nearly equal size, as (samples that count, views).

    Where there are fewer samples than parts, some parts hold the first sample again and count zero. Tensors whose first
    dimension is not the batch (a scalar, a shared table) go to every part whole.
    """
    bounds = [size * k // parts for k in range(parts + 1)]

    def cut(start: int, end: int) -> Any:
        rows = slice(start, end) if end > start else slice(0, 1)
        return map_tensors(lambda t: t[rows] if t.ndim and len(t) == size else t, data)

    return [(end - start, cut(start, end)) for start, end in pairwise(bounds)]


def split_sizes(data: Any, sizes: list[int]) -> list[Any]:
    """Cut gathered samples into batches of these sizes: views, made in one call a tensor."""
    if isinstance(data, Tensor):
        return list(data.split_with_sizes(sizes))
    if isinstance(data, Mapping):
        return [dict(zip(data, values)) for values in zip(*(split_sizes(value, sizes) for value in data.values()))]
    columns = zip(*(split_sizes(value, sizes) for value in data))
    return list(columns) if isinstance(data, tuple) else [list(values) for values in columns]
