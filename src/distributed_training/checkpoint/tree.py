"""Nested state taken apart into tensors by name and a JSON description, and put together again. No pickle anywhere."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distributed_training.runtime.errors import CheckpointError

Tensors = dict[str, Tensor]


def take_apart(state: Any) -> tuple[Any, Tensors]:
    """(description, tensors). Tensors that share their memory, like tied weights, are listed once."""
    tensors: Tensors = {}
    return _describe(state, "", tensors, {}), tensors


def put_together(description: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The state that `take_apart` described."""
    if isinstance(description, list):
        return [put_together(value, tensors) for value in description]
    if not isinstance(description, dict):
        return description
    for mark, build in _BUILDERS.items():
        if mark in description:
            return build(description[mark], tensors)
    return {key: put_together(value, tensors) for key, value in description.items()}


def _describe(value: Any, path: str, tensors: Tensors, seen: dict[Any, str]) -> Any:
    if isinstance(value, Tensor):
        return {"$tensor": _add(value.detach(), path, tensors, seen)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
        # A read-only array and one with negative strides become no tensor as they are.
        array = value if value.flags.writeable and min(value.strides, default=0) >= 0 else value.copy()
        return {"$array": _add(torch.from_numpy(array), path, tensors, seen)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (np.bool_, np.integer, np.floating)):
        return value.item()
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, (list, tuple)):
        items = [_describe(v, f"{path}/{i}", tensors, seen) for i, v in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: _describe(v, f"{path}/{key}", tensors, seen) for key, v in value.items()}
        return {
            "$items": [
                [_describe(k, path, tensors, seen), _describe(v, f"{path}/{k}", tensors, seen)]
                for k, v in value.items()
            ]
        }
    raise CheckpointError(
        f"state at {path or '/'} is a {type(value).__name__}, which a checkpoint cannot hold; "
        "use tensors, arrays, numbers, text, lists and dicts"
    )


def _add(tensor: Tensor, path: str, tensors: Tensors, seen: dict[Any, str]) -> str:
    name = path[1:] or "value"
    while (
        name in tensors or name == "__metadata__"
    ):  # keys 1 and "1" look alike in a path; the other is safetensors' own
        name += "'"
    if tensor.numel():
        same = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        if same in seen:
            return seen[same]
        seen[same] = name
    tensors[name] = tensor
    return name


_BUILDERS: dict[str, Any] = {
    "$tensor": lambda name, tensors: tensors[name],
    "$array": lambda name, tensors: tensors[name].numpy(),
    "$bytes": lambda text, _: base64.b64decode(text),
    "$tuple": lambda items, tensors: tuple(put_together(v, tensors) for v in items),
    "$items": lambda items, tensors: {put_together(k, tensors): put_together(v, tensors) for k, v in items},
}
