"""The GPU side of a loader worker: its batches into the hub, the hub's orders to it."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from distributed_training._version import __version__
from distributed_training.data.base import Batch, Share
from distributed_training.feed.arrivals import Arrival, Run
from distributed_training.feed.compression import CODECS, decompress
from distributed_training.feed.guests import Guest
from distributed_training.feed.homecoming.courier import Courier
from distributed_training.feed.homecoming.guest import HomeGuest
from distributed_training.feed.hub import Hub
from distributed_training.feed.shared import host_id
from distributed_training.feed.tensors import as_tensor
from distributed_training.wire import Batch as WireBatch
from distributed_training.wire import PeerError, Reason
from distributed_training.wire.messages import (
    Blocked,
    Join,
    NoWork,
    Refused,
    Release,
    Request,
    SampleFailed,
    Welcome,
    Work,
)

if TYPE_CHECKING:
    from distributed_training.feed.session import Session
    from distributed_training.wire.events import Event
    from distributed_training.wire.fields import Fact

logger = logging.getLogger(__name__)


class WorkerGuest(Guest):
    """A loader worker, and what the hub needs to know of it (see `arrivals.Peer`)."""

    def __init__(self, session: Session, hub: Hub, courier: Courier) -> None:
        super().__init__(session)
        self.name, self.window, self.wake = session.name, session.window, session.wake
        self.shared = False
        self._hub, self._courier = hub, courier
        self._home: HomeGuest | None = None
        self._arrivals: list[Arrival] = []
        self._failed: dict[tuple[int, int], set[int]] = {}  # samples that it could not load
        self._last_failure: SampleFailed | None = None

    @property
    def arriving(self) -> bool:
        """Whether it is in the midst of sending a batch."""
        return self.session.arriving

    def admit(self, join: Join) -> Welcome | Refused:
        too_few = _too_few(join, self._hub.share.ranks)
        if too_few is not None:
            return too_few
        told, join = join.facts, replace(join, facts={k: v for k, v in join.facts.items() if not k.startswith("home")})
        receives = self._courier.wants(told, self._hub.share.ranks)  # before training can see that it is here
        refused = self._hub.admit(self, join)
        if refused is not None:
            return refused
        if receives:
            self._home = HomeGuest(self.session, self._courier, told)
            self._courier.join(self._home)
        self.shared = self.session.shares_memory and join.host == host_id() and bool(join.host)
        codecs = tuple(sorted(set(join.codecs) & CODECS.keys()))
        facts: dict[str, Fact] = {"on_bad_sample": self._hub.on_bad_sample}
        where = " (shared memory)" if self.shared else ""
        logger.info("%s joined from %s%s", self.name, self.session.peer, where)
        return Welcome(self.name, __version__, facts, codecs, self.shared, self._hub.settings.memory)

    def hear(self, event: Event) -> None:
        if isinstance(event, WireBatch):
            if not self.session.leaving:
                self._check(event)
                self._arrivals.append(self._arrival(event) if event.steps == 1 else self._run(event))
        elif isinstance(event, Request):
            self._hub.wants(self, event.steps)
        elif isinstance(event, Release):
            self._released(event)
        elif isinstance(event, Blocked):
            self.heard()  # what came before it is not what it waits with
            self._hub.blocked(self, event.size)
        elif isinstance(event, SampleFailed):
            self._sample_failed(event)
        elif self._home is not None:
            self._home.hear(event)

    def heard(self) -> None:
        total = self.session.connection.receiving.received
        if self._arrivals or total != self.window.received:
            arrivals, self._arrivals = self._arrivals, []
            self._hub.received(self, total, arrivals)

    def speak(self, now: float) -> None:
        for message in self._hub.orders(self):
            self.session.connection.send(message)
        if self._home is not None:
            self._home.speak()

    def patience(self) -> float:
        return self._home.patience() if self._home is not None else math.inf

    def farewell(self) -> None:
        self.session.connection.send(NoWork(Work.FINISHED, 0.0))

    def gone(self) -> None:
        self._hub.leave(self)
        if self._home is not None:
            self._home.gone()

    # -- batches

    def _check(self, batch: WireBatch) -> None:
        share, last = Share(batch.rank, batch.ranks), batch.step + batch.steps
        if not self._hub.keeping.expects(share) or last > self._hub.steps_per_epoch:
            raise PeerError(
                f"a batch of step {last - 1} for rank {batch.rank} of {batch.ranks}, which nobody asked for"
            )
        if batch.compressed:
            decompress(batch)

    def _run(self, run: WireBatch) -> Arrival:
        """Neighbouring steps that came in one piece; its ids are those of the plan."""
        hub, share, steps = self._hub, Share(run.rank, run.ranks), run.steps
        whole = hub.run_ids(run.epoch, run.step, steps)
        rows = len(run.buffers[0]) // 8 // steps
        if not _same_ids(run.buffers[0], whole, share, rows):
            raise self._not_planned(run)
        data = run.data(as_tensor)
        hub.keeping.keep(run.step, steps, run.ids, data)
        content = Run(whole, data, rows, partial(hub.keeping.own, share))
        return Arrival(run.epoch, run.step, run.raw_size // steps, content, run.seconds / steps, steps)

    def _arrival(self, batch: WireBatch) -> Arrival:
        """A batch of tensors that are views of the memory it was received into; its ids are those of the plan."""
        hub, share = self._hub, Share(batch.rank, batch.ranks)
        step_ids = hub.step_ids(batch.epoch, batch.step)
        ids = step_ids[share.rows(len(step_ids))] if share.ranks > 1 else step_ids
        data = batch.data(as_tensor)
        if bytes(batch.buffers[0]) == ids.tobytes():
            hub.keeping.keep(batch.step, 1, ids, data)
            whole = hub.keeping.own(share, step_ids, data)
        else:
            rest = self._without_failed(batch, ids)
            whole = Batch(rest, data, skipped=ids[~np.isin(ids, rest)])
        return Arrival(batch.epoch, batch.step, batch.raw_size, whole, batch.seconds)

    def _without_failed(self, batch: WireBatch, planned: np.ndarray) -> np.ndarray:
        """The ids of a batch that lacks samples which could not be loaded; anything else is not what the plan says."""
        failed = self._failed.get((batch.epoch, batch.step), set())
        rest = planned[~np.isin(planned, list(failed))]
        if self._hub.on_bad_sample != "skip" or bytes(batch.buffers[0]) != rest.tobytes():
            raise self._not_planned(batch)
        return rest

    def _not_planned(self, batch: WireBatch) -> PeerError:
        return PeerError(
            f"step {batch.step} of epoch {batch.epoch} came with other samples than the plan has; both sides need the "
            "same release",
            Reason.PLAN,
        )

    def _sample_failed(self, event: SampleFailed) -> None:
        self._failed.setdefault((event.epoch, event.step), set()).add(event.sample)
        self._last_failure = event
        self._hub.sample_failed(self, event.epoch, event.step, event.sample, event.text)

    def _released(self, event: Release) -> None:
        last = self._last_failure
        if event.reason is Reason.SAMPLE and last is not None:  # no part of the step can be had
            self._hub.sample_failed(self, last.epoch, last.step, last.sample, last.text, final=True)
        self._hub.released(self, event.lease, event.first)


def _same_ids(came: memoryview, whole: np.ndarray | list[np.ndarray], share: Share, rows: int) -> bool:
    """Whether a run has this share of the planned steps, so many rows of each."""
    if isinstance(whole, np.ndarray):
        own = whole[:, share.rows(whole.shape[1])]
        return own.shape[1] == rows and bytes(came) == own.tobytes()
    parts = [ids[share.rows(len(ids))] for ids in whole]
    return all(len(ids) == rows for ids in parts) and bytes(came) == b"".join([ids.data for ids in parts])


def _too_few(join: Join, ranks: int) -> Refused | None:
    """A loader that listens does not know how many ranks will call it, and one would wait for ever for a worker."""
    workers = join.facts.get("workers")
    if type(workers) is not int or workers >= ranks:
        return None
    return Refused(
        Reason.CONFIG,
        f"{workers} loader workers for {ranks} ranks; each rank needs at least one: start the loader with more "
        f"(--workers {ranks}, num_workers={ranks})",
    )
