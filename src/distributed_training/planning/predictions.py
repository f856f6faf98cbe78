"""A plan: the predictions for each strategy and number of ranks, and what is known of machine and model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from distributed_training.planning.cluster import Cluster
from distributed_training.planning.memory import Memory
from distributed_training.planning.step_time import StepTime
from distributed_training.planning.ways import Way


@dataclass
class Prediction:
    """One strategy on so many ranks."""

    way: Way
    ranks: int
    batch: int
    """Samples of a rank in a step: of the one that has most."""
    global_batch: int
    memory: Memory
    time: StepTime
    needed: float
    """Bytes that a device must have: memory, what the process and its libraries take, and room to spare."""
    fits: bool
    efficiency: float
    """Throughput, to as many times that of one device."""
    hours_per_epoch: float
    price: float | None = None
    """Of a GPU for an hour."""
    measured_memory: float | None = None
    measured_step: float | None = None
    pace: float = 1.0
    """Time that `single` took by turns with what was measured, to the time from which this was predicted."""
    check: bool = False
    """Only to compare with what is measured: a batch size that nobody asked for."""
    trouble: str = ""
    """Why it could not be measured."""

    @property
    def throughput(self) -> float:
        """Samples a second."""
        return self.global_batch / self.time.whole

    @property
    def cost_per_epoch(self) -> float | None:
        """In the currency of the price."""
        return None if self.price is None else self.price * self.ranks * self.hours_per_epoch

    @property
    def memory_error(self) -> float | None:
        """Of the prediction, to what was measured."""
        return None if self.measured_memory is None else self.memory.total / self.measured_memory - 1

    @property
    def step_error(self) -> float | None:
        """Of the prediction, to what was measured."""
        return None if self.measured_step is None else self.time.whole * self.pace / self.measured_step - 1


@dataclass
class Advice:
    """What to take for a number of ranks, and why."""

    ranks: int
    label: str | None
    """None where nothing fits."""
    reasons: list[str] = field(default_factory=list)
    settings: str = ""
    """What to set."""
    remedies: list[str] = field(default_factory=list)
    """What would make fit what does not."""


@dataclass
class Curve:
    """Samples a second of one strategy over numbers of ranks."""

    label: str
    kind: str
    """strong: the batch stays; weak: it grows with the ranks."""
    points: list[tuple[int, float]]
    """(ranks, samples a second)."""


@dataclass
class Plan:
    """All that was predicted."""

    title: str
    command: str
    model: dict[str, Any]
    cluster: Cluster
    assumed: list[str]
    """What was neither measured nor said by the user."""
    predictions: list[Prediction]
    advice: list[Advice]
    curves: list[Curve]
    notes: list[str]
    global_batch: int
    epochs: int
    scaling: str

    def at(self, ranks: int) -> list[Prediction]:
        """Of one number of ranks."""
        return [one for one in self.predictions if one.ranks == ranks and not one.check]

    @property
    def counts(self) -> list[int]:
        """Numbers of ranks, ascending."""
        return sorted({one.ranks for one in self.predictions})

    @property
    def measured(self) -> list[Prediction]:
        """Those that were really run here, too."""
        return [one for one in self.predictions if one.measured_step is not None or one.trouble]
