"""The same PyTorch training script from a laptop to many machines, and proof that it is the same training.

Names are imported when they are first used: importing this package is quick and does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from distributed_training._version import __version__

if TYPE_CHECKING:
    from distributed_training.config import Config, get_config
    from distributed_training.data import ArrayDataset, Dataset, Loader, Plan
    from distributed_training.huggingface import AcceleratedTrainer, BasicTrainer
    from distributed_training.launch.spawn import spawn
    from distributed_training.models import get_model
    from distributed_training.runtime.errors import DistributedTrainingError
    from distributed_training.split import ColabGPUTrainer, CPULoader, GPUTrainer
    from distributed_training.training import (
        Callback,
        EarlyStopping,
        Trainer,
        TrainingResult,
        create_distributed_trainer,
    )

_HOME = {
    "AcceleratedTrainer": "huggingface",
    "ArrayDataset": "data",
    "BasicTrainer": "huggingface",
    "CPULoader": "split",
    "Callback": "training",
    "ColabGPUTrainer": "split",
    "Config": "config",
    "Dataset": "data",
    "DistributedTrainingError": "runtime.errors",
    "EarlyStopping": "training",
    "GPUTrainer": "split",
    "Loader": "data",
    "Plan": "data",
    "Trainer": "training",
    "TrainingResult": "training",
    "create_distributed_trainer": "training",
    "get_config": "config",
    "get_model": "models",
    "spawn": "launch.spawn",
}

__all__ = [
    "AcceleratedTrainer",
    "ArrayDataset",
    "BasicTrainer",
    "CPULoader",
    "Callback",
    "ColabGPUTrainer",
    "Config",
    "Dataset",
    "DistributedTrainingError",
    "EarlyStopping",
    "GPUTrainer",
    "Loader",
    "Plan",
    "Trainer",
    "TrainingResult",
    "__version__",
    "create_distributed_trainer",
    "get_config",
    "get_model",
    "spawn",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
