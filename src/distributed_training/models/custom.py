"""Users' own models, named by import path in `model.target`."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from distributed_training.config import ModelConfig
from distributed_training.models.base import Shape
from distributed_training.runtime.errors import ModelError
from distributed_training.runtime.imports import import_object


def build(config: ModelConfig, input_shape: Shape | None) -> nn.Module:
    """What `model.target` makes of `model.args`; `num_classes` is added where it is known and taken."""
    if config.target is None:
        raise ModelError("model.target is not set")
    target = import_object(config.target, "model.target")
    if not callable(target) or isinstance(target, nn.Module):
        raise ModelError(
            f"model.target={config.target}: must be a class or function that makes the model, not {target!r}"
        )
    args: dict[str, Any] = dict(config.args)
    if config.num_classes is not None and _takes(target, "num_classes"):
        args.setdefault("num_classes", config.num_classes)
    try:
        model = target(**args)
    except TypeError as error:
        raise ModelError(f"model.target={config.target} does not take model.args={args}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"model.target={config.target} made a {type(model).__name__}, not a torch.nn.Module")
    return model


def _takes(target: Any, name: str) -> bool:
    try:
        return name in inspect.signature(target).parameters
    except (TypeError, ValueError):  # some callables written in C have no signature
        return False
