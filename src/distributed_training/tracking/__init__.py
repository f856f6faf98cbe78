"""Experiment trackers: who receives the metrics of a run. JSONL is always there, the others are chosen by name."""

from __future__ import annotations

import importlib

from distributed_training.config import ConfigError, TrackingConfig
from distributed_training.config.check import did_you_mean
from distributed_training.tracking.base import RunInfo, Tracker
from distributed_training.tracking.composite import Trackers

__all__ = ["TRACKERS", "RunInfo", "Tracker", "Trackers", "make_trackers"]

# Imported only when named, so that nobody pays for (or needs) a library he does not use.
TRACKERS = {
    "jsonl": "distributed_training.tracking.jsonl:JsonlTracker",
    "tensorboard": "distributed_training.tracking.tensorboard:TensorBoardTracker",
    "wandb": "distributed_training.tracking.wandb:WandbTracker",
}


def make_trackers(config: TrackingConfig, rank: int = 0) -> Trackers:
    """The trackers of a run: JSONL first, then those named in `tracking.trackers`. Only rank 0 has any.

    A name that is unknown and a library that is missing are mistakes of the user: they raise here, before training.
    """
    for name in config.trackers:  # on every rank, so that all of them stop for a wrong name
        if name not in TRACKERS:
            hint = did_you_mean(name, TRACKERS) or f"; known are {', '.join(TRACKERS)}"
            raise ConfigError(f"tracking.trackers: unknown tracker {name!r}{hint}")
    if rank != 0:
        return Trackers([])
    return Trackers([_make(name, config) for name in dict.fromkeys(["jsonl", *config.trackers])])


def _make(name: str, config: TrackingConfig) -> Tracker:
    module, _, class_name = TRACKERS[name].partition(":")
    tracker: Tracker = getattr(importlib.import_module(module), class_name)(config)
    return tracker
