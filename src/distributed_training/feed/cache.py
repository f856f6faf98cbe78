"""The epoch cache: samples stay on the GPU side as they arrive, so that later epochs need no transfer.

Every epoch has the samples in another order, so what is kept is samples, not batches. The plan says which samples a
step has; a step whose samples are all here is put together here and is never lent to a loader. With a shuffled plan
hardly any step is complete before all samples are, so there the whole dataset has to fit, or nothing is kept.

Of several ranks each takes whole steps while its cache fills, not only its own rows: in the next epoch it needs others.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import numpy as np

from distributed_training.data.base import Batch, Share
from distributed_training.feed.cache_store import MemoryStore, Store
from distributed_training.feed.columns import (
    Column,
    Shape,
    Unkept,
    leaf_shapes,
    put_together,
    row_width,
    same_shape,
    sample_sizes,
    take_apart,
)
from distributed_training.feed.planning import EpochPlan, PlannedIds

logger = logging.getLogger(__name__)

Allocate = Callable[[int], memoryview]


class Room:
    """Bytes that all parts of a cache may take together. Whoever takes some has the lock."""

    def __init__(self, size: int) -> None:
        self.size, self.used = size, 0
        self.lock = threading.Lock()

    @property
    def left(self) -> int:
        """Bytes that are free."""
        return self.size - self.used


class SampleCache:
    """Samples of one dataset. Any thread may add; rows that are written never change, so to take them needs no lock.

    What was added counts once it is published: the batch that it came in is to be known first, or a step would be both
    here and on its way.
    """

    def __init__(self, name: str, samples: int, room: Room, store: Store, *, shuffled: bool) -> None:
        """`shuffled`: of use only as a whole."""
        self.name, self.samples, self.growing = name, samples, True
        """`growing`: whether it may still come to hold all samples."""
        self._room, self._store, self._shuffled = room, store, shuffled
        self._lock = room.lock
        self._written, self._held = np.zeros(samples, bool), np.zeros(samples, bool)
        self._count = self._filled = 0
        self._shape: Shape | None = None
        self._columns: list[Column] = []
        kept = store.kept(samples)
        if kept is not None:
            self._shape, self._columns, self._held = kept
            self._written, self._count = self._held.copy(), int(self._held.sum())
            self._filled = self._count
            room.used += store.size
            logger.info("feed.cache: %d of %d samples of %s are here already", self._count, samples, name)

    @property
    def count(self) -> int:
        """Samples that are here."""
        return self._count

    @property
    def complete(self) -> bool:
        """Whether all are here."""
        return self._count == self.samples

    @property
    def filling(self) -> bool:
        """Whether more may come."""
        return self.growing and not self.complete

    def holds(self, ids: np.ndarray) -> bool:
        """Whether all these samples are here."""
        if not self._count:
            return False
        return self.complete or bool(self._held[ids[0]] and self._held[ids].all())

    def take(self, ids: np.ndarray, allocate: Allocate) -> object:
        """A batch of samples that are all here."""
        assert self._shape is not None
        return put_together(self._shape, iter([column.take(ids, allocate) for column in self._columns]))

    def add(self, ids: np.ndarray, data: object) -> None:
        """Keep what is new of these samples, as long as there is room."""
        with self._lock:
            if not self.growing or self._filled == self.samples:
                return
            try:
                shape, leaves = take_apart(data, len(ids))
                sizes = sample_sizes(shape, leaves, len(ids))
                self._begin(shape, float(sizes.mean()))
                self._write(ids, leaves, sizes)
            except Unkept as why:
                self._give_up(str(why))
            except OSError as error:
                self._give_up(f"the disk does not take it ({error.strerror})")

    def _write(self, ids: np.ndarray, leaves: list[object], sizes: np.ndarray) -> None:
        chosen = np.flatnonzero(~self._written[ids])
        chosen = chosen[np.cumsum(sizes[chosen]) <= self._room.left]
        if len(chosen):
            own = ids[chosen]
            for column, leaf in zip(self._columns, leaves):
                column.put(own, leaf, chosen)
            self._store.added(own, self._columns)
            self._written[own] = True
            self._filled += len(own)
            self._room.used += int(sizes[chosen].sum())
        if not self._written[ids].all():
            raise Unkept(f"the {self._room.size >> 20} MiB of feed.cache_mb are used up")
        if self._filled == self.samples:
            self._store.commit()
            logger.info("feed.cache: all %d samples of %s are here", self.samples, self.name)

    def publish(self, ids: np.ndarray) -> None:
        """What was added of these samples may be used from now on. Not by two threads at a time."""
        new = ids[self._written[ids] & ~self._held[ids]]
        self._held[new] = True
        self._count += len(new)

    def _begin(self, shape: Shape, one: float) -> None:
        """The first batch shows how a sample is built, and of how many bytes."""
        if self._shape is not None:
            if not same_shape(shape, self._shape):
                raise Unkept("batches differ in the shape of their samples")
            return
        if any(leaf[0] in ("tensor", "array") and not row_width(leaf) for leaf in leaf_shapes(shape)):
            raise Unkept("a tensor has rows without anything in them")
        needed = int(one * self.samples)
        if self._shuffled and needed > self._room.left:
            raise Unkept(
                f"its {self.samples} samples take about {needed / 2**20:,.0f} MiB, and shuffled ones are of use only "
                f"if all of them fit; set feed.cache_mb to {needed // 2**20 + 1 + (self._room.used >> 20)} or more"
            )
        self._columns, self._shape = self._store.begin(shape, self.samples), shape

    def _give_up(self, why: str) -> None:
        """Keep no more. What is held stays: somebody may have been promised it."""
        self.growing = False
        logger.warning("feed.cache: %s is not kept as a whole: %s", self.name, why)

    def close(self) -> None:
        """Nothing more will come."""
        with self._lock:
            self.growing = False
            try:
                self._store.commit()
            except OSError as error:
                logger.warning("feed.cache: what was kept of %s is lost (%s)", self.name, error.strerror)
            self._store.close()
            for column in self._columns:
                column.close()


class EpochCache:
    """The samples of training and those held out, and which steps can be made of them."""

    def __init__(self, plan: EpochPlan, size: int, open_store: Callable[[str], Store] | None = None) -> None:
        """`open_store` gives the place for each part by name; left out, memory."""
        make = open_store or (lambda name: MemoryStore())
        self._ids, self._trained = PlannedIds(plan), plan.train.steps_per_epoch
        room = Room(size)
        train, held_out = plan.train, plan.validation
        self.train = SampleCache("the training data", train.samples, room, make("train"), shuffled=train.shuffle)
        self.validation = (
            SampleCache("the held-out data", held_out.samples, room, make("validation"), shuffled=False)
            if held_out is not None
            else None
        )

    @property
    def filling(self) -> bool:
        """Whether the training samples may still come to be all here."""
        return self.train.filling

    @property
    def hopeful(self) -> bool:
        """Whether what comes in this epoch may make transfers of the next one needless."""
        held_out = self.validation
        return self.filling or (self.train.complete and held_out is not None and held_out.filling)

    def _part(self, step: int) -> SampleCache:
        return self.train if step < self._trained or self.validation is None else self.validation

    def holds(self, epoch: int, step: int, share: Share) -> bool:
        """Whether this share of a step can be made here."""
        part = self._part(step)
        if part.complete or not part.count:
            return part.complete
        ids = self._ids(epoch, step)
        return part.holds(ids[share.rows(len(ids))])

    def batch(self, epoch: int, step: int, share: Share, allocate: Allocate) -> Batch:
        """This share of a step, for which `holds` was true."""
        ids = self._ids(epoch, step)
        return share.batch(ids, self._part(step).take(ids[share.rows(len(ids))], allocate))

    def keep(self, first: int, steps: int, ids: np.ndarray, data: object) -> None:
        """Samples of neighbouring steps came, their ids as the plan has them."""
        if first >= self._trained or first + steps <= self._trained:
            self._part(first).add(ids, data)

    def publish(self, epoch: int, step: int) -> None:
        """The batch of this step is known: see `SampleCache.publish`."""
        self._part(step).publish(self._ids(epoch, step))

    def close(self) -> None:
        """Write down what is to last."""
        self.train.close()
        if self.validation is not None:
            self.validation.close()
