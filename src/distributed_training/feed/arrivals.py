"""What connections bring to the hub."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from distributed_training.data.base import Batch
from distributed_training.feed.credit import Window
from distributed_training.runtime.errors import DistributedTrainingError


@dataclass(slots=True)
class Arrival:
    """A batch that came, or the error that stands in its place."""

    epoch: int
    step: int
    size: int
    """Bytes that it holds."""
    seconds: float = 0.0
    batch: Batch | None = None
    error: DistributedTrainingError | None = None


class Peer(Protocol):
    """What the hub needs to know of a connection."""

    name: str
    window: Window
    shared: bool

    def wake(self) -> None:
        """Have its thread look for something to send."""


@dataclass
class BadSample:
    """A sample that was left out, for the run's records."""

    epoch: int
    step: int
    sample: int
    text: str
    loader: str
