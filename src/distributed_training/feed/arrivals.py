"""What connections bring to the hub."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from distributed_training.data.base import Batch
from distributed_training.feed.credit import Window
from distributed_training.runtime.errors import DataError, DistributedTrainingError


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

    @property
    def arriving(self) -> bool:
        """Whether it is in the midst of sending a batch."""

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

    def is_that_of(self, other: BadSample) -> bool:
        """Whether the same sample of the same step was named before, by whomever."""
        return (self.epoch, self.step, self.sample) == (other.epoch, other.step, other.sample)

    def as_skipped(self) -> str:
        """For the log."""
        return f"{self.loader}: sample {self.sample} left out of epoch {self.epoch}, step {self.step}: {self.text}"

    def as_error(self) -> DataError:
        """What ends the training."""
        return DataError(
            f"sample {self.sample} cannot be loaded (epoch {self.epoch}, step {self.step}, by {self.loader}): "
            f"{self.text}; repair it, or set on_bad_sample=skip to train without such samples"
        )
