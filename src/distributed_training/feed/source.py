"""Batches from other machines as a batch source: the training loop cannot tell it from a local loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from distributed_training.data.base import Batch, BatchSource, Share
from distributed_training.data.plan import Plan
from distributed_training.feed.figures import Figures
from distributed_training.feed.hub import Hub

_FEW = 64


class FeedSource(BatchSource):
    """Batches in step order from whoever loads them.

    Tensors are views of received memory, which is used again once nobody looks at it.
    """

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._turn: object = None

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
        """Yield (step, batch) of this epoch from step `start` on."""
        last = self.steps_per_epoch
        if start >= last:
            return
        turn = self._turn = object()
        self._hub.seek(epoch, start)
        step = start
        while step < last:
            taken = self._hub.take(last - step)
            taken.reverse()
            while taken:
                _, arrival = taken.pop()  # not kept here: its memory is to be free when the loop is done with it
                if arrival.error is not None:
                    raise arrival.error
                batch, arrival = arrival.batch, None  # type: ignore[assignment]
                assert batch is not None
                yield step, batch
                del batch
                step += 1
                if self._turn is not turn:  # a newer call reads from the feed now
                    return

    def describe(self) -> dict[str, Any]:
        """The plan and the data: equal for two sources that give the same batches."""
        return {**self.plan.describe(), "dataset": self._hub.dataset}

    def figures(self) -> Figures:
        """What the feed did so far."""
        return self._hub.figures()
