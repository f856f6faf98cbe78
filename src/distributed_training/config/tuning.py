"""Settings of a search for hyper-parameters (`dtrain tune`). Other commands take no notice of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from distributed_training.config.check import at_least, between, check_types, positive, seconds_of
from distributed_training.config.errors import ConfigError


@dataclass(kw_only=True)
class TuningConfig:
    """What `dtrain tune` searches, and how. Each trial is an ordinary run of the other settings."""

    space: dict[str, Any] = field(default_factory=dict)
    """What is searched: `training.lr: {loguniform: [1e-4, 1e-1]}`; also uniform, int, choice, with log, step, when."""
    objectives: dict[str, Any] = field(default_factory=dict)
    """Metrics, and whether small or large is good: `val_accuracy: max`. Left out: that of `checkpoint.monitor`."""
    algorithm: Literal["bayesian", "random", "grid"] = "bayesian"
    """How values are chosen: by Optuna's TPE from what earlier trials gave, at random, or every combination."""
    samples: int = 20
    """How many trials; with pbt, how many train together. A grid has as many as it has points."""
    grid_points: int = 3
    """Values that a grid takes from a range that says nothing of `points` or `step`."""
    scheduler: Literal["asha", "pbt", "none"] = "asha"
    """asha ends bad trials early; pbt lets bad ones go on from copies of good ones; none trains all to the end."""
    grace_epochs: int = 1
    """asha: epochs that every trial may train."""
    reduction: int = 4
    """asha: one of so many trials goes on at each halving; the next comes after so many times the epochs."""
    perturb_epochs: int = 2
    """pbt: epochs between two chances to take over a better trial's weights and change settings."""
    max_concurrent: int | None = None
    """Trials at a time. Left out: as many as the cluster has room for."""
    time_budget: str | None = None
    """Time after which the search ends with what it has: 90s, 30m, 1h30m, 2d."""
    seed: int = 0
    """Seed of the values that are tried. The seed of the trainings is `training.seed`."""
    retries: int = 1
    """How often a trial that fails is started again, from its newest checkpoint, before it counts as failed."""
    workers_per_trial: int = 1
    """Processes of each trial, which train together by `strategy.name`."""
    cpus_per_worker: float = 1.0
    """CPUs that Ray sets aside for each process of a trial; also its threads, if `run.threads` is left out."""
    gpus_per_trial: float | None = None
    """GPUs of each trial: 0.5 puts two trials on one. Left out: one a process if the cluster has any, unless on CPU."""
    share_feed: Literal["auto", "on", "off"] = "auto"
    """One feed for all trials: a sample is preprocessed once, for all. auto: where samples take time to load."""
    feed_memory_mb: int = 1024
    """Preprocessed samples that this feed may keep on each machine. Trials load the rest for themselves."""
    feed_workers: int | None = None
    """Processes on each machine that load for all trials. Left out: one for each CPU."""
    address: str | None = None
    """A Ray cluster: `auto` or HOST:PORT. Left out: that of RAY_ADDRESS, or that of this machine, or one made here."""

    def __post_init__(self) -> None:
        check_types(self, "tuning")
        for name, mode in self.objectives.items():
            if mode not in ("min", "max"):
                raise ConfigError(f"tuning.objectives.{name}={mode!r} must be min or max")
        at_least("tuning.samples", self.samples, 1)
        at_least("tuning.grid_points", self.grid_points, 2)
        at_least("tuning.grace_epochs", self.grace_epochs, 1)
        at_least("tuning.reduction", self.reduction, 2)
        at_least("tuning.perturb_epochs", self.perturb_epochs, 1)
        at_least("tuning.max_concurrent", self.max_concurrent, 1)
        between("tuning.seed", self.seed, 0, 2**32 - 1)
        at_least("tuning.retries", self.retries, 0)
        at_least("tuning.workers_per_trial", self.workers_per_trial, 1)
        positive("tuning.cpus_per_worker", self.cpus_per_worker)
        at_least("tuning.gpus_per_trial", self.gpus_per_trial, 0)
        if self.gpus_per_trial is not None and self.gpus_per_trial > 1 and self.gpus_per_trial % 1:
            raise ConfigError(f"tuning.gpus_per_trial={self.gpus_per_trial}: a fraction is of one GPU: 0.5, or 1, or 2")
        each = (self.gpus_per_trial or 0) / self.workers_per_trial
        if each > 1 and each % 1:
            raise ConfigError(
                f"tuning.gpus_per_trial={self.gpus_per_trial:g}: {each:g} for each of tuning.workers_per_trial="
                f"{self.workers_per_trial} processes; a process has whole GPUs, or a part of one"
            )
        at_least("tuning.feed_memory_mb", self.feed_memory_mb, 1)
        at_least("tuning.feed_workers", self.feed_workers, 1)
        budget_seconds(self.time_budget)


def budget_seconds(text: str | None) -> float | None:
    """`1h30m` in seconds."""
    return None if text is None else seconds_of("tuning.time_budget", text)
