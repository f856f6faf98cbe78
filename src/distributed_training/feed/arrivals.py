"""What connections bring to the hub."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from distributed_training.data.base import Batch
from distributed_training.data.nested import split_sizes
from distributed_training.feed.credit import Window
from distributed_training.runtime.errors import DataError, DistributedTrainingError


@dataclass(slots=True, eq=False)
class Run:
    """Neighbouring steps in one piece, the same number of rows of each.

    Whoever takes them cuts them. The thread that receives needs far longer for it, for in its core's cache is what
    others worked with meanwhile; and training, which needs the interpreter, waits for most of that.
    """

    step_ids: np.ndarray | Sequence[np.ndarray]
    """Ids of each whole step."""
    data: Any
    rows: int
    own: Callable[[np.ndarray, Any], Batch]
    """This side's batch, of the ids of a whole step and the rows that came."""

    def cut(self, first: int, last: int) -> list[Batch]:
        """Some of its steps, counted from its first one."""
        rows = self.rows
        sizes = [first * rows, *[rows] * (last - first), (len(self.step_ids) - last) * rows]
        return list(map(self.own, self.step_ids[first:last], split_sizes(self.data, sizes)[1:-1]))


@dataclass(slots=True, eq=False)
class Arrival:
    """A step that came, or several in one piece, or the error that stands in the place of one."""

    epoch: int
    step: int
    size: int
    """Bytes that each step holds."""
    content: Batch | Run | DistributedTrainingError
    seconds: float = 0.0
    """How long it took to load each step."""
    steps: int = 1

    def outcomes(self, first: int, last: int) -> list[Outcome]:
        """What there is for its steps [first, last), numbered as those of an epoch are."""
        if isinstance(self.content, Run):
            return [*self.content.cut(first - self.step, last - self.step)]
        return [self.content]


Outcome = Batch | DistributedTrainingError
"""What training finds at a step."""


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
