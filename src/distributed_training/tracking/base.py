"""What an experiment tracker must do. One file beside this one for each tracker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunInfo:
    """What a tracker is told of the run when it starts."""

    name: str
    """Name of the run: the name of its folder."""
    directory: Path
    """The run's folder. A tracker keeps its own files in a folder of its name below it."""
    config: Mapping[str, Any]
    """All settings, nested, plain values."""
    resumed_from: int | None = None
    """Global step that the run continues from, or None for a fresh one."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Machine, versions, model size, dataset: worth keeping, not worth configuring."""


class Tracker(ABC):
    """Receives the metrics of a run.

    Called on rank 0 only, from the training thread, between two steps: a call must be quick and must not wait for a
    network. Whatever it raises is logged once and this tracker is left out from then on; training goes on.
    """

    @abstractmethod
    def start(self, run: RunInfo) -> None:
        """The run begins, or goes on after a resume: continue the same record then."""

    @abstractmethod
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Metrics (train_loss, lr, val_accuracy, ...) at a global step, as plain numbers."""

    def checkpoint(self, path: Path, step: int, metrics: Mapping[str, float]) -> None:  # noqa: B027 (optional)
        """A checkpoint folder was committed. It may be removed later by the run's own clean-up."""

    @abstractmethod
    def finish(self, status: str, summary: Mapping[str, float]) -> None:
        """The run ended: `completed`, `stopped early`, `interrupted` or `failed`. Called exactly once."""
