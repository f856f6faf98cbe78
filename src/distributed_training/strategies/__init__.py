"""How one step runs on one or many devices, chosen by one word."""

from __future__ import annotations

import torch

from distributed_training.config.check import did_you_mean
from distributed_training.runtime.errors import ConfigError
from distributed_training.runtime.imports import import_object
from distributed_training.strategies.base import StepResult, StepSettings, Strategy

__all__ = ["STRATEGIES", "StepResult", "StepSettings", "Strategy", "make_strategy"]

STRATEGIES = {
    "single": "distributed_training.strategies.single:SingleDevice",
}


def make_strategy(name: str, device: torch.device) -> Strategy:
    """The strategy of this name. auto: what fits the devices and launcher found."""
    if name == "auto":
        name = "single"
    if name not in STRATEGIES:
        raise ConfigError(
            f"strategy={name!r} is unknown; known: {', '.join(STRATEGIES)}{did_you_mean(name, STRATEGIES)}"
        )
    strategy: Strategy = import_object(STRATEGIES[name], "strategy.name")(device)
    return strategy
