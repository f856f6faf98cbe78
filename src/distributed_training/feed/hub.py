"""Where connections and training meet: one lock around the sequencer, the memory bound and the figures.

Each connection's thread brings batches and asks what to do next; the training thread takes batches in order. Nobody
sends or receives, and no tensor is copied, while the lock is held.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from itertools import groupby
from operator import itemgetter

import numpy as np

from distributed_training.data.base import Batch, Share
from distributed_training.data.plan import PLAN_VERSION, Plan
from distributed_training.feed.arrivals import Arrival, BadSample, Outcome, Peer
from distributed_training.feed.credit import Credit
from distributed_training.feed.figures import Counts, Figures
from distributed_training.feed.horizon import Horizon
from distributed_training.feed.keeping import Keeping
from distributed_training.feed.planning import EpochPlan, PlannedIds, facts_of, plan_from
from distributed_training.feed.sequencer import Sequencer
from distributed_training.feed.settings import FeedSettings
from distributed_training.feed.waiting import Waiting
from distributed_training.runtime.errors import DataError, DistributedTrainingError
from distributed_training.wire import Expected, Reason, refusal
from distributed_training.wire.fields import Fact
from distributed_training.wire.messages import Cancel, Join, Lease, Message, Progress, Refused
from distributed_training.wire.messages import Credit as CreditMessage

logger = logging.getLogger(__name__)

_LOOK = 1.0  # seconds between two looks at what training waits for
_FEW = 64  # steps that training takes at a time
_LIGHT = 64 << 20  # bytes of steps that may wait here without a need, so that they can be ordered together
_GRACE = 10.0  # seconds that a step may still take to come after a wish to stop, where others wait for this process


class Hub:
    """Shared by all threads of a feed. Methods take the lock themselves."""

    def __init__(
        self,
        settings: FeedSettings,
        plan: Plan | None,
        dataset: str | None,
        epochs: int | None,
        facts: Mapping[str, Fact] | None = None,
    ) -> None:
        self.settings, self.dataset, self.epochs = settings, dataset, epochs
        self.plan: Plan | None = None
        self.validation: Plan | None = None
        """Steps of held-out samples that follow those of training in every epoch; the first loader brings them."""
        self.told: dict[str, Fact] = {}
        """All that the first loader said of its data."""
        self._expected: dict[str, Fact] = dict(facts or {})
        self.share = Share()
        self.skipped: list[BadSample] = []
        self.told_to_stop: Callable[[], bool] = lambda: False
        """Asked about once a second while training waits: whether a signal asked this process to stop."""
        self._lock = threading.Condition()
        self._peers: dict[str, Peer] = {}
        self._cancels: dict[str, list[Message]] = {}
        self._credit = Credit(settings.memory)
        self._horizon = Horizon(most=settings.max_steps_ahead)
        self.keeping = Keeping(settings, lambda: self.share)
        self._sequencer: Sequencer[Arrival] | None = None
        self._ids: PlannedIds | None = None
        self._plan_of_all: EpochPlan
        self._counts = Counts()
        self._largest = 0
        self._taken = 0  # bytes of what training took last
        self._stopped: DistributedTrainingError | None = None
        self._last_arrival = time.monotonic()
        if plan is not None:
            self._use(EpochPlan(plan))
            self._expected = facts_of(EpochPlan(plan))

    def _use(self, plan: EpochPlan) -> None:
        self.plan, self.validation = plan.train, plan.validation
        self._plan_of_all, self._ids = plan, PlannedIds(plan)
        self._sequencer = Sequencer(plan.steps, lease=self.settings.lease, shortest_lease=self.settings.shortest_lease)
        self._sequencer.arriving = lambda worker: self._peers[worker].arriving

    @property
    def sequencer(self) -> Sequencer[Arrival]:
        """The sequencer, once there is a plan."""
        assert self._sequencer is not None
        return self._sequencer

    # -- connections

    def admit(self, peer: Peer, join: Join) -> Refused | None:
        """Take in a worker that has the right data; the first one brings the plan where this side has none."""
        with self._lock:
            if self._stopped is not None:
                return Refused(Reason.SHUTTING_DOWN, str(self._stopped))
            refused = refusal(join, Expected(dataset=self.dataset, plan=PLAN_VERSION, facts=self._expected))
            if refused is None and self.plan is None:
                refused = self._take_plan(join)
            if refused is None and (error := self.keeping.open(self._plan_of_all, join)) is not None:
                self._stop(error)  # a mistake in the settings of this side
                refused = Refused(Reason.CONFIG, str(error))
            if refused is None:
                if self.keeping.cache is not None:
                    self.sequencer.have, self.sequencer.one_epoch = self.keeping.have, self.keeping.hopeful
                self._take_facts(join)
                self.dataset = join.dataset
                self._peers[peer.name] = peer
                self._cancels[peer.name] = []
                self._credit.join(peer.window)
                self.sequencer.join(peer.name, time.monotonic())
                self._last_arrival = time.monotonic()
                self._lock.notify_all()
            return refused

    def _take_plan(self, join: Join) -> Refused | None:
        """The first loader says what an epoch is; all others must say the same."""
        try:
            plan = plan_from(join.facts)
        except DataError as error:
            return Refused(Reason.CONFIG, str(error))
        self._use(plan)
        self._expected |= facts_of(plan)
        if plan.validation is not None:
            self._expected["validation_dataset"] = join.facts.get("validation_dataset")
        return None

    def _take_facts(self, join: Join) -> None:
        """What a loader says beside its plan is of use where nobody said it before."""
        if not self.told:
            self.told = dict(join.facts)
        if "workers" in join.facts:  # of a loader that listens: it may have been started again with more
            self.told["workers"] = join.facts["workers"]
        epochs = join.facts.get("epochs")
        if self.epochs is None and type(epochs) is int and epochs > 0:
            self.epochs = epochs

    def leave(self, peer: Peer) -> None:
        """A connection ended: what it was to bring is for others."""
        with self._lock:
            if self._peers.pop(peer.name, None) is not None:
                self._cancels.pop(peer.name)
                self._credit.leave(peer.window)
                self.sequencer.leave(peer.name)
                self._last_arrival = time.monotonic()
                self._wake_hungry()
                self._lock.notify_all()

    def wants(self, peer: Peer, steps: int) -> None:
        """A worker can take more steps."""
        with self._lock:
            if peer.name in self._peers:
                self.sequencer.want(peer.name, min(steps, self.settings.max_steps_ahead))

    def released(self, peer: Peer, lease: int, first: int) -> None:
        """A worker gives steps back."""
        with self._lock:
            if peer.name in self._peers:
                self.sequencer.released(peer.name, lease, first)
                self._wake_hungry()

    def received(self, peer: Peer, total: int, arrivals: list[Arrival]) -> None:
        """Batches came: keep those that nobody brought before. `total` is all payload of the connection so far."""
        now = time.monotonic()
        with self._lock:
            if peer.name not in self._peers:
                return
            sequencer, was_ready = self.sequencer, self.sequencer.ready
            self._counts.bytes += self._credit.arrived(peer.window, total)
            for arrival in arrivals:
                self._counts.loading += arrival.seconds * arrival.steps
                new = sequencer.arrived(peer.name, arrival.epoch, arrival.step, arrival, now, arrival.steps)
                if new:
                    self._credit.waiting += arrival.size * new
                    self._largest = max(arrival.size, int(self._largest * 0.999))
                    self._last_arrival = now
            self.keeping.publish(arrivals)
            sequencer.one_epoch = self.keeping.hopeful
            most = min(self.settings.max_steps_ahead, self._credit.steps(self._largest))
            self._horizon.bound(most, _LIGHT // max(1, self._largest))
            sequencer.horizon = self._horizon.steps
            for worker, lease in sequencer.cancelled():
                self._cancels[worker].append(Cancel(lease, Reason.CANCELLED, "another worker brought these steps"))
                self._peers[worker].wake()
            self._wake_blocked()
            if not was_ready and sequencer.ready:
                self._lock.notify_all()

    def blocked(self, peer: Peer, size: int) -> None:
        """A worker has a batch that needs more credit than it has; 0 where it need not be sent any more."""
        with self._lock:
            self._credit.blocked(peer.window, size)
            if not size:
                self._wake_blocked()

    @property
    def on_bad_sample(self) -> str:
        """What to do about a bad sample. Ranks that skip would no longer agree on the size of a step: so they stop."""
        return self.settings.on_bad_sample if self.share.ranks == 1 else "stop"

    def sample_failed(self, peer: Peer, epoch: int, step: int, sample: int, text: str, *, final: bool = False) -> None:
        """A dataset raised on a sample: what training sees of it is for the setting to say, unless nothing is left."""
        bad = BadSample(epoch, step, sample, text, peer.name)
        with self._lock:
            if self.on_bad_sample == "skip" and not final:
                if not any(map(bad.is_that_of, self.skipped)):
                    self.skipped.append(bad)
                    logger.warning("%s", bad.as_skipped())
                return
            index = epoch * self.sequencer.steps_per_epoch + step
            self.sequencer.put(index, Arrival(epoch, step, 0, bad.as_error()))
            self._lock.notify_all()

    def step_ids(self, epoch: int, step: int) -> np.ndarray:
        """Ids of a whole step."""
        assert self._ids is not None
        return self._ids(epoch, step)

    def run_ids(self, epoch: int, first: int, steps: int) -> np.ndarray | list[np.ndarray]:
        """Ids of each of some neighbouring steps; as a matrix where all have the same number."""
        assert self._ids is not None
        return self._ids.run(epoch, first, steps)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of training and validation together, as leases and batches number them."""
        return self.sequencer.steps_per_epoch

    def orders(self, peer: Peer) -> list[Message]:
        """What a connection is to be told now: credit, leases, leases taken back."""
        messages: list[Message] = []
        with self._lock:
            if peer.name not in self._peers or self._stopped is not None:
                return messages
            messages += self._cancels[peer.name]
            self._cancels[peer.name] = []
            try:
                limit = self._credit.grant(peer.window)
            except DataError as error:
                self._stop(error)
                return messages
            if limit is not None:
                messages.append(CreditMessage(limit))
            elif peer.window.blocked > peer.window.promised:
                self._make_room(peer)
            now, sequencer = time.monotonic(), self.sequencer
            first = True
            while (grant := sequencer.grant(peer.name, now)) is not None:
                if first:
                    messages.append(self._progress(sequencer, now))
                    first = False
                part, (lease, epoch, start, last, seconds) = self.keeping.lending, grant
                messages.append(Lease(lease, epoch, start, last, part.rank, part.ranks, seconds))
        return messages

    def _progress(self, sequencer: Sequencer[Arrival], now: float) -> Progress:
        epoch, step = divmod(sequencer.position, sequencer.steps_per_epoch)
        waited = int(1000 * self._counts.wait_share(now))
        return Progress(epoch, step, sequencer.horizon, sequencer.depth, waited, len(self._peers))

    def _make_room(self, peer: Peer) -> None:
        """The step that training waits for has no room to arrive: throw away what is needed last, to load it again."""
        if not self.sequencer.holds(peer.name, self.sequencer.position) or not self._credit.crowded():
            return
        if (evicted := self.sequencer.evict()) is not None:
            self._credit.waiting -= evicted.size
            self._horizon.bound(max(1, self.sequencer.depth))
            self.sequencer.horizon = self._horizon.steps
            peer.wake()

    def _wake_hungry(self) -> None:
        if self.sequencer.worth_asking():
            for name in self.sequencer.hungry():
                self._peers[name].wake()

    def _wake_blocked(self) -> None:
        for peer in self._peers.values():
            if peer.window.blocked > peer.window.promised:
                peer.wake()

    # -- training

    def wait_for_plan(self) -> Plan:
        """The plan, which the first worker brings where this side was given none."""
        with self._lock:
            waiting = Waiting("the first loader, which says what the data is", self.settings)
            waiting.said = waiting.since  # that it waits now is no news
            while self.plan is None or self.dataset is None:
                self._check_wait(waiting)
                self._lock.wait(_LOOK)
            return self.plan

    def seek(self, epoch: int, step: int) -> None:
        """Training goes on at this step."""
        self.wait_for_plan()
        with self._lock:
            sequencer = self.sequencer
            self._credit.waiting -= self._taken
            if sequencer.position != epoch * sequencer.steps_per_epoch + step or not sequencer.end:
                sequencer.seek(epoch, step, max(epoch + 1, self.epochs or 0))
                self._credit.waiting = sum(arrival.size for arrival in sequencer.items())
            elif sequencer.end < (epoch + 1) * sequencer.steps_per_epoch:
                sequencer.end = (epoch + 1) * sequencer.steps_per_epoch
            self._taken = 0
            if not self._counts.steps:  # what was before the first step was no training
                self._counts.since = time.monotonic()
            sequencer.horizon = self._horizon.steps
            for worker, lease in sequencer.cancelled():
                self._cancels[worker].append(Cancel(lease, Reason.CANCELLED, "training went elsewhere"))
            for peer in self._peers.values():
                peer.wake()

    @property
    def ready(self) -> bool:
        """Whether the next step is here: `take` would not wait."""
        with self._lock:
            return self.sequencer.ready

    def take(self, most: int, *, patient: bool = False) -> list[Outcome]:
        """What there is for the next steps, in order; waits for the first of them. What was taken before may be
        forgotten now.

        A wish to stop ends the wait by StoppedWaiting: at once, or, where it is `patient`, if the step does not come
        soon.
        """
        with self._lock:
            sequencer = self.sequencer
            self._credit.waiting -= self._taken
            self._taken = 0
            if not sequencer.ready:
                self._wait(f"step {sequencer.position % sequencer.steps_per_epoch}", _GRACE if patient else 0.0)
            taken = sequencer.take(max(1, min(most, _FEW, self._horizon.steps // 8)))
            here = [arrival for _, arrival in taken if arrival is not None]
            self._taken = sum([arrival.size for arrival in here])
            self._counts.steps += len(taken)
            self.keeping.served += len(taken) - len(here)
            self._horizon.delivered(len(taken), sequencer.depth, time.monotonic())
            sequencer.horizon = self._horizon.steps
            self._wake_hungry()
            self._wake_blocked()
        outcomes: list[Outcome] = []
        for arrival, together in groupby(taken, itemgetter(1)):
            indexes = [index for index, _ in together]
            step = indexes[0] % sequencer.steps_per_epoch
            outcomes += (arrival or self.keeping.arrival(indexes[0])).outcomes(step, step + len(indexes))
        self._counts.samples += sum([batch.rows for batch in outcomes if isinstance(batch, Batch)])
        return outcomes

    def _wait(self, what: str, grace: float) -> None:
        """Until the next step is here. The lock is held, and let go while waiting."""
        sequencer, start = self.sequencer, time.monotonic()
        waiting = Waiting(what, self.settings, grace, start)
        self._horizon.waited()
        sequencer.horizon = self._horizon.steps
        self._last_arrival = max(self._last_arrival, start)
        try:
            while not sequencer.ready:
                self._check_wait(waiting)
                self._wake_hungry()
                self._wake_blocked()
                now, late, alone = time.monotonic(), sequencer.expires(), not self._peers
                self._lock.wait(min(_LOOK, max(0.01, late - now)) if late is not None else _LOOK)
                if alone:
                    self._counts.alone += time.monotonic() - now
        finally:
            self._counts.waited += time.monotonic() - start
        waiting.over()

    def _check_wait(self, waiting: Waiting) -> None:
        """Whether it still makes sense to wait; says so now and then."""
        if self._stopped is not None:
            raise self._stopped
        waiting.heed(self.told_to_stop())
        if self._peers:
            holders = self.sequencer.waits_for() if self._sequencer is not None else []
            waiting.with_loaders(len(self._peers), self._last_arrival, holders)
        else:
            waiting.alone()

    def _stop(self, error: DistributedTrainingError) -> None:
        self._stopped = error
        self._lock.notify_all()

    def stop(self, error: DistributedTrainingError) -> None:
        """End all waits with this error."""
        with self._lock:
            self._stop(error)

    # -- figures

    def figures(self) -> Figures:
        """What happened so far."""
        with self._lock:
            counts, sequencer = self._counts, self._sequencer
            return Figures(
                seconds=time.monotonic() - counts.since,
                steps=counts.steps,
                samples=counts.samples,
                bytes=counts.bytes,
                waited=counts.waited,
                alone=counts.alone,
                loading=counts.loading,
                queue=sequencer.depth if sequencer is not None else 0,
                horizon=self._horizon.steps,
                loaders=len(self._peers),
                shared=sum([peer.shared for peer in self._peers.values()]),
                duplicates=sequencer.duplicates if sequencer is not None else 0,
                reissued=sequencer.reissued if sequencer is not None else 0,
                cached=self.keeping.served,
            )

    @property
    def memory_held(self) -> int:
        """Bytes of batches that are here or may come at any moment."""
        with self._lock:
            return self._credit.held
