"""Hugging Face end to end, each stage by itself: load data, process, load a model, train, evaluate, save, push.

Names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed_training.huggingface.data import load_data, process
    from distributed_training.huggingface.evaluation import evaluate
    from distributed_training.huggingface.model import load_image_processor, load_model, load_tokenizer
    from distributed_training.huggingface.publish import push
    from distributed_training.huggingface.saving import save
    from distributed_training.huggingface.trainers import AcceleratedTrainer, BasicTrainer

_HOME = {
    "AcceleratedTrainer": "trainers",
    "BasicTrainer": "trainers",
    "evaluate": "evaluation",
    "load_data": "data",
    "load_image_processor": "model",
    "load_model": "model",
    "load_tokenizer": "model",
    "process": "data",
    "push": "publish",
    "save": "saving",
}

__all__ = [
    "AcceleratedTrainer",
    "BasicTrainer",
    "evaluate",
    "load_data",
    "load_image_processor",
    "load_model",
    "load_tokenizer",
    "process",
    "push",
    "save",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
