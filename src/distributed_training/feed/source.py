"""Batches from other machines as a batch source: the training loop cannot tell it from a local loader."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from distributed_training.data.ahead import copied_ahead
from distributed_training.data.base import Batch, BatchSource, Share
from distributed_training.data.plan import Plan
from distributed_training.feed.figures import Figures
from distributed_training.feed.hub import Hub
from distributed_training.feed.waiting import StoppedWaiting

_PERIOD = 0.1  # seconds over which a rate says something


class FeedSource(BatchSource):
    """Batches in step order from whoever loads them.

    Tensors are views of received memory, which is used again once nobody looks at it.
    """

    local = False

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._turn: object = None
        self._epoch = 0
        self._told, self._due = Figures(), 0.0
        self._metrics: dict[str, float] = {}
        self._at_hand = 0  # batches that were taken from the hub and not read yet

    @property
    def share(self) -> Share:
        """Which part of every step is read. Set before the first batch."""
        return self._hub.share

    @share.setter
    def share(self, share: Share) -> None:
        self._hub.share = share

    @property
    def plan(self) -> Plan:
        """Which samples make up which step. Waits for the first loader where this side has no plan of its own."""
        return self._hub.wait_for_plan()

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch."""
        return self.plan.steps_per_epoch

    def batches(self, epoch: int, start: int = 0) -> Iterator[tuple[int, Batch]]:
        """Yield (step, batch) of this epoch from step `start` on; ends early where a wait was told to stop."""
        self._epoch = epoch
        patient = self.share.ranks > 1  # the others may have this step already, and wait for this rank
        try:
            yield from self.read(epoch, start, self.steps_per_epoch, patient=patient)
        except StoppedWaiting:
            if patient:
                raise

    @property
    def told(self) -> dict[str, Any]:
        """All that the first loader said of its data."""
        return dict(self._hub.told)

    def validation(self) -> HeldOutSource | None:
        """The held-out samples that the loaders bring, if they do. Waits for the first loader."""
        self._hub.wait_for_plan()
        return HeldOutSource(self, self._hub) if self._hub.validation is not None else None

    @property
    def epoch(self) -> int:
        """The epoch that was read last."""
        return self._epoch

    def read(self, epoch: int, start: int, last: int, *, patient: bool = False) -> Iterator[tuple[int, Batch]]:
        """Yield the steps [start, last) of an epoch as the feed numbers them: training first, then validation."""
        steps = self._read(epoch, start, last, patient)
        if self.device is None or self.device.type != "cuda":
            return steps
        return copied_ahead(steps, self.device, lambda: self._at_hand > 0 or self._hub.ready)

    def _read(self, epoch: int, start: int, last: int, patient: bool) -> Iterator[tuple[int, Batch]]:
        if start >= last:
            return
        turn = self._turn = object()
        self._hub.seek(epoch, start)
        step = start
        while step < last:
            taken = self._hub.take(last - step, patient=patient)
            taken.reverse()
            while taken:
                batch = taken.pop()  # not kept here: its memory is to be free when the loop is done with it
                if not isinstance(batch, Batch):
                    raise batch
                self._at_hand = len(taken)
                yield step, batch
                del batch
                step += 1
                if self._turn is not turn:  # a newer call reads from the feed now
                    return

    def describe(self) -> dict[str, Any]:
        """The plan and the data: equal for two sources that give the same batches."""
        return {**self.plan.describe(), "dataset": self._hub.dataset}

    def heed(self, told_to_stop: Callable[[], bool]) -> None:
        """End a wait for loaders when this becomes true."""
        self._hub.told_to_stop = told_to_stop

    def metrics(self) -> dict[str, float]:
        """What the feed does now: rates of the last tenth of a second or longer, between calls that ask for them."""
        now = time.monotonic()
        if now >= self._due:
            before, self._told = self._told, self._hub.figures()
            self._metrics, self._due = self._told.since(before).as_metrics(), now + _PERIOD
        return self._metrics

    def figures(self) -> Figures:
        """What the feed did so far."""
        return self._hub.figures()


class HeldOutSource(BatchSource):
    """The held-out samples that come over the same feed, after the training steps of every epoch."""

    local = False

    def __init__(self, feed: FeedSource, hub: Hub) -> None:
        assert hub.validation is not None
        self._feed, self._hub = feed, hub
        self.plan = hub.validation

    @property
    def share(self) -> Share:
        """That of the feed: a rank has one part of everything."""
        return self._hub.share

    @share.setter
    def share(self, share: Share) -> None:
        self._hub.share = share

    @property
    def steps_per_epoch(self) -> int:
        """Batches of held-out samples."""
        return self.plan.steps_per_epoch

    def batches(self, epoch: int, start: int = 0) -> Iterator[tuple[int, Batch]]:
        """Yield (step, batch). They are the same in every epoch; those that follow the one read last are at hand."""
        first = self._feed.steps_per_epoch
        for step, batch in self._feed.read(self._feed.epoch, first + start, first + self.steps_per_epoch, patient=True):
            yield step - first, batch

    def describe(self) -> dict[str, Any]:
        """The plan of the held-out samples."""
        return dict(self.plan.describe())
