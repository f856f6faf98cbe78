"""What a loader gives in an epoch: the steps of training, then those of validation, numbered on.

To the feed an epoch is one row of steps, so that held-out samples are ordered, prepared ahead, lent again after a fault
and bounded in memory like all others. Only the two ends know where the one ends and the other begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from distributed_training.data.base import Dataset, Share
from distributed_training.data.plan import Plan, derive_key
from distributed_training.data.steps import Block, Rooms, read_blocks
from distributed_training.data.torch_dataset import fetch
from distributed_training.feed.packing import RUN
from distributed_training.feed.planning import EpochPlan, KeptPlan, facts_of
from distributed_training.feed.repeating import sample_facts
from distributed_training.feed.rows import in_memory, row_bytes
from distributed_training.runtime.errors import DataError
from distributed_training.wire.fields import Fact

_NAMED_AT_ONCE = 2 * RUN  # bytes of rows that are only named


@dataclass(frozen=True)
class Part:
    """A dataset and how it is divided into steps."""

    dataset: Dataset
    plan: Plan
    row: int = field(init=False, default=0)
    """Bytes of a sample where it lies in memory as rows of tensors; else 0."""
    at_hand: bool = field(init=False, default=False)
    """Whether those rows lie in no file. What has to be read first is read before a connection is held up by it."""
    kept: KeptPlan = field(init=False, repr=False, compare=False)
    """The same plan, for many leases of a few steps."""

    def __post_init__(self) -> None:
        if self.plan.samples != len(self.dataset):
            raise DataError(
                f"the plan is for {self.plan.samples} samples, but the dataset has {len(self.dataset)}: make it anew"
            )
        object.__setattr__(self, "kept", KeptPlan(self.plan))
        rows = self.dataset.rows(np.zeros(1, np.int64)) if len(self.dataset) else None
        object.__setattr__(self, "row", row_bytes(rows) if rows is not None else 0)
        object.__setattr__(self, "at_hand", bool(self.row) and in_memory(rows))


@dataclass(frozen=True)
class Piece:
    """Neighbouring steps of one part."""

    part: Part
    epoch: int
    first: int
    last: int
    """Numbers of the part's own plan."""
    offset: int
    """Added to them they are the numbers of the feed."""

    def blocks(self, share: Share, *, gathered: bool, run: int = RUN, rooms: Rooms | None = None) -> Iterator[Block]:
        """The steps as they are fetched, `run` bytes of samples at once; not `gathered`: as rows that lie where they
        lie, if it can be done. `rooms`: see `read_blocks`."""
        part, span = self.part, (self.epoch, self.first, self.last)
        at_once = _NAMED_AT_ONCE if part.row and not gathered else run
        for block in read_blocks(
            part.dataset, part.kept, share, *span, at_once=at_once, gathered=gathered, rooms=rooms
        ):
            block.first += self.offset
            yield block

    def ids(self) -> np.ndarray:
        """Samples of a piece of one step."""
        return self.part.plan.ids(self.epoch, self.first)

    def fetch(self, ids: np.ndarray) -> Any:
        """Some of its samples."""
        return fetch(self.part.dataset, ids, derive_key(self.part.plan.seed, self.epoch))

    def bad_samples(self, ids: np.ndarray) -> dict[int, str]:
        """Which of these samples cannot be loaded, and why."""
        bad = {}
        for at, sample in enumerate(ids.tolist()):
            try:
                self.fetch(ids[at : at + 1])
            except Exception as error:
                bad[sample] = str(error) or type(error).__name__
        return bad


@dataclass(frozen=True)
class Course:
    """All that a loader has."""

    train: Part
    validation: Part | None = None
    facts: Mapping[str, Fact] = field(default_factory=dict)
    """What the GPU side may want to know beside the plan, such as the number of epochs or of classes."""

    @property
    def plan(self) -> EpochPlan:
        """The plan of both parts."""
        return EpochPlan(self.train.plan, self.validation.plan if self.validation is not None else None)

    def all_facts(self) -> dict[str, Fact]:
        """What the GPU side is told when a worker joins."""
        held_out = {} if self.validation is None else {"validation_dataset": self.validation.dataset.fingerprint()}
        return {**self.facts, **facts_of(self.plan), **held_out, **sample_facts(self.train.dataset)}

    def pieces(self, epoch: int, first: int, last: int) -> list[Piece]:
        """The steps [first, last) of an epoch as the feed numbers them."""
        trained, found = self.train.plan.steps_per_epoch, []
        if first < trained:
            found.append(Piece(self.train, epoch, first, min(last, trained), 0))
        if last > trained:
            if self.validation is None or last > self.plan.steps:
                raise DataError(f"step {last - 1} of epoch {epoch} is none of the {self.plan.steps} of this loader")
            found.append(Piece(self.validation, 0, max(first - trained, 0), last - trained, trained))
        return found
