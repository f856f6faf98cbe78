"""Optimizers built from the config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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


def apply_changes(optimizer: Optimizer, then: Mapping[str, Any], now: TrainingConfig) -> None:
    """Settings that were changed since a state was saved, in place of those that came with the state.

    Only where the optimizer has what the config said then: one that was given in Python has settings of its own.
    """
    for group in optimizer.param_groups:
        for name, value in (("weight_decay", now.weight_decay), ("momentum", now.momentum)):
            spared = name == "weight_decay" and all(p.ndim <= 1 for p in group["params"])
            if value != then.get(name) and group.get(name) == then.get(name) and not spared:
                group[name] = value
