"""Optimizers built from the config."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from distributed_training.config import TrainingConfig
from distributed_training.runtime.errors import ModelError


def build_optimizer(model: nn.Module, config: TrainingConfig) -> Optimizer:
    """The optimizer of `training.optimizer`. Biases and norms (one-dimensional) get no weight decay."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ModelError(f"{type(model).__name__} has no parameter to train")
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
    return kind(groups, lr=config.lr)
