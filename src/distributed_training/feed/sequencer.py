"""Who loads which step: pure logic, without sockets, threads or a clock.

Steps of all epochs are numbered through: `index = epoch * steps_per_epoch + step`. Training is at `position`. The
indexes [position, position + horizon) may be lent out, in leases of neighbouring ones. What a step holds is a
function of the plan alone, so it does not matter who brings it: of several arrivals the first one counts, and a lease
can be given to a second worker, after some time, without taking it from the first. Items leave in order, each exactly
once.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

Item = TypeVar("Item")

_LEASE_SPAN = 0.2  # seconds of work in one lease
_HELD_SPAN = 1.0  # and in all leases of a worker: more than any link needs to ask for the next one
_LONGEST = 256  # steps in one lease: each lease takes time from training
_UNTRIED = 64  # steps that a worker may hold while its speed is not known, in leases of one each
_AT_ONCE = 3  # leases' worth of steps that a worker may hold: one being loaded, one on its way, one in hand
_LATE = 4.0  # times what a lease should take
_PATIENCE = 4.0  # times longer where something of it is coming
_HOLDERS = 3  # workers that may be busy with one step at a time
_MEASURED, _AT_FIRST = 0.05, 0.005  # seconds over which a speed is measured; until then leases are of one step


class Grant(NamedTuple):
    """Steps [first, last) of an epoch, lent to a worker."""

    lease: int
    epoch: int
    first: int
    last: int
    seconds: float


@dataclass(eq=False)
class _Lease:
    number: int
    worker: _Worker
    open: set[int]
    expires: float
    latest: float
    """When it is late even if something of it is coming."""
    expired: bool = False


@dataclass(eq=False)
class _Worker:
    name: str
    leases: dict[int, _Lease] = field(default_factory=dict)
    wanted: int = 0
    held: int = 0
    speed: float | None = None  # steps a second
    counted: int = 0  # steps since its speed was measured last
    since: float = 0.0  # when that was, times without any work to do left out
    busy: float = 0.0  # the time between that and the last arrival
    stalled: bool = False  # late, and nothing was heard of it since: it gets no more until it shows that it lives


class Sequencer(Generic[Item]):
    """Leases out, items in, items out in order. Every method that needs the time is given it."""

    def __init__(self, steps_per_epoch: int, *, lease: float = 30.0, shortest_lease: float = 2.0) -> None:
        if steps_per_epoch < 1:
            raise ValueError(f"an epoch of {steps_per_epoch} steps")
        self.steps_per_epoch = steps_per_epoch
        self.position = self.end = 0
        self.horizon = 2
        self.duplicates = 0
        """Items that came when another had come before."""
        self.reissued = 0
        """Steps that were lent again because they did not come in time, or because their holder left."""
        self.arriving: Callable[[str], bool] = lambda worker: False
        """Whether a batch of this worker is coming just now: on a slow link it must not be lent to others for that."""
        self.have: Callable[[int], bool] | None = None
        """Whether a step can be had without a worker: then it is never lent, and its item is None."""
        self.one_epoch = False
        """Whether steps of later epochs are not to be lent yet: what comes now may make them needless."""
        self._unmeasured, self._shortest = lease, shortest_lease
        self._items: dict[int, Item] = {}
        self._holders: dict[int, list[_Lease]] = {}
        self._workers: dict[str, _Worker] = {}
        self._fresh = 0
        self._again: list[int] = []
        self._numbers = 0
        self._cancelled: list[tuple[str, int]] = []

    # -- training's side

    def seek(self, epoch: int, step: int, epochs: int) -> None:
        """Training goes on at this step, and needs everything up to the end of epoch `epochs` - 1."""
        self.position = epoch * self.steps_per_epoch + step
        self.end = max(self.position, epochs * self.steps_per_epoch)
        self._items = {i: item for i, item in self._items.items() if self.position <= i < self._limit}
        self._settle([i for i in self._holders if not self.position <= i < self._limit])
        self._fresh, self._again = self.position, []
        for own in self._workers.values():
            for lease in own.leases.values():
                self._again += lease.open if lease.expired else ()
        heapq.heapify(self._again)

    @property
    def _limit(self) -> int:
        limit = min(self.position + self.horizon, self.end)
        if self.one_epoch:
            limit = min(limit, (self.position // self.steps_per_epoch + 1) * self.steps_per_epoch)
        return limit

    def _had(self, index: int) -> bool:
        """Whether a step needs no worker."""
        return self.have is not None and index < self.end and self.have(index)

    def take(self, most: int) -> list[tuple[int, Item | None]]:
        """(index, item) of the next steps that are here, at most so many.

        One that needs no worker is the last, with None: it has to be made, and nobody has room for many of these.
        """
        items, at = self._items, self.position
        taken: list[tuple[int, Item | None]] = []
        while len(taken) < most and at in items:
            taken.append((at, items.pop(at)))
            at += 1
        if len(taken) < most and self._had(at):
            taken.append((at, None))
            at += 1
        self.position = at
        return taken

    @property
    def depth(self) -> int:
        """Steps that are here."""
        return len(self._items)

    @property
    def ready(self) -> bool:
        """Whether the next step is here."""
        return self.position in self._items or self._had(self.position)

    def items(self) -> Iterable[Item]:
        """What is here, in no order."""
        return self._items.values()

    def waits_for(self) -> list[str]:
        """Names of the workers that the next step was lent to."""
        return [lease.worker.name for lease in self._holders.get(self.position, [])]

    def put(self, index: int, item: Item) -> None:
        """Have this as the item of a step, whoever was to load it."""
        if self.position <= index < self.end:
            self._items.setdefault(index, item)
            self._settle([index])

    def evict(self) -> Item | None:
        """Throw away the item that is needed last, to make room; it will be loaded again."""
        index = max(self._items, default=self.position)
        if index == self.position:
            return None
        heapq.heappush(self._again, index)
        return self._items.pop(index)

    # -- workers

    def join(self, worker: str, now: float) -> None:
        """A worker is here."""
        self._workers[worker] = _Worker(worker, since=now)

    def leave(self, worker: str) -> None:
        """A worker is gone: what it held goes to others."""
        gone = self._workers.pop(worker, None)
        if gone is not None:
            for lease in list(gone.leases.values()):
                self._give_back(lease, set(lease.open))

    def want(self, worker: str, steps: int) -> None:
        """A worker could take so many further steps."""
        self._workers[worker].wanted += steps
        self._workers[worker].stalled = False

    def grant(self, worker: str, now: float) -> Grant | None:
        """The next lease for a worker; None while there is none for it."""
        own = self._workers[worker]
        self._expire(now)
        chunk = self._chunk(own)
        most = min(own.wanted, self._share(own) - own.held, chunk)
        if most < 1 or own.stalled:
            return None
        indexes = self._pick_again(own, most)
        # Who has enough to do waits for a whole lease. A worker asks for as many steps as the lease had that it begins:
        # short ones, from the time when its speed was not known, would else be followed by short ones for ever.
        if not indexes and (not own.held or (self.unlent >= most and (most == chunk or own.held < chunk))):
            indexes = self._pick_fresh(most)
        if not indexes:
            return None
        return self._lend(own, indexes, now)

    def arrived(self, worker: str, epoch: int, step: int, item: Item, now: float, steps: int = 1) -> int:
        """A step came, or several in one piece, which is the item of each; how many are of use. The others came before,
        or nobody needs them now."""
        first = epoch * self.steps_per_epoch + step
        own = self._workers.get(worker)
        if own is not None:
            own.counted += steps
            own.busy = now - own.since
            own.stalled = False
            if own.busy >= (_MEASURED if own.speed is not None else _AT_FIRST):
                self._measure(own, now)
        needed = range(max(first, self.position), min(first + steps, self.end))
        new = [index for index in needed if index not in self._items]
        self.duplicates += steps - len(new)
        self._items.update(dict.fromkeys(new, item))
        self._settle(new, by=own)
        return len(new)

    def released(self, worker: str, lease: int, first: int) -> None:
        """A worker gives back the steps of a lease from `first` on (a step within its epoch)."""
        own = self._workers[worker].leases.get(lease)
        if own is not None and own.open:
            epoch = min(own.open) // self.steps_per_epoch
            self._give_back(own, {i for i in own.open if i >= epoch * self.steps_per_epoch + first})

    def cancelled(self) -> list[tuple[str, int]]:
        """(worker, lease) of all leases that became needless since the last call."""
        cancelled, self._cancelled = self._cancelled, []
        return [(worker, lease) for worker, lease in cancelled if worker in self._workers]

    def expires(self) -> float | None:
        """When the next lease is late."""
        times = [lease.expires for own in self._workers.values() for lease in own.leases.values() if not lease.expired]
        return min(times, default=None)

    @property
    def unlent(self) -> int:
        """Steps within the horizon that nobody has had yet."""
        return max(0, self._limit - max(self._fresh, self.position))

    def worth_asking(self) -> bool:
        """Whether a worker that asks now may get something: not for each step, that would be many leases."""
        if self._again or self.unlent >= max(1, self.horizon // 8, min(_LONGEST, self._part)):
            return True
        return self.unlent > 0 and self._limit < self.position + self.horizon  # the last ones: no more will join them

    def hungry(self) -> list[str]:
        """Workers that could take more steps than they hold."""
        return [own.name for own in self._workers.values() if own.wanted > 0 and not own.stalled]

    def holds(self, worker: str, index: int) -> bool:
        """Whether a step is lent to this worker."""
        return any(lease.worker.name == worker for lease in self._holders.get(index, []))

    def speeds(self) -> dict[str, float | None]:
        """Steps a second of each worker, as far as known."""
        return {own.name: own.speed for own in self._workers.values()}

    # -- lending

    def _share(self, own: _Worker) -> int:
        """How many steps a worker may hold: its part of the horizon by speed, the mean where that is not known.

        But no more than some seconds' worth. Workers that share a slow link would else bring, each from its own part of
        a long horizon, what is needed much later at the expense of what is needed next.
        """
        if len(self._workers) == 1:
            return self.horizon if own.speed is not None else min(self.horizon, _UNTRIED)
        known = [w.speed for w in self._workers.values() if w.speed is not None]
        mean = sum(known) / len(known) if known else 1.0
        total = sum([w.speed if w.speed is not None else mean for w in self._workers.values()])
        part = (own.speed if own.speed is not None else mean) / total if total > 0 else 1.0
        most = self.horizon * part
        return max(2, round(min(most, own.speed * _HELD_SPAN if own.speed is not None else _UNTRIED)))

    def _chunk(self, own: _Worker) -> int:
        """Steps in one lease: some tenths of a second of work, so that a worker that is lost takes little with it."""
        if own.speed is None:
            return 1
        return max(1, min(_LONGEST, int(own.speed * _LEASE_SPAN), self._part))

    @property
    def _part(self) -> int:
        """Steps of a lease by the horizon: every worker can hold a few of them."""
        return self.horizon // (_AT_ONCE * max(1, len(self._workers)))

    def _pick_again(self, own: _Worker, most: int) -> list[int]:
        """Neighbouring steps that have to be lent again, the earliest first."""
        picked: list[int] = []
        aside: list[int] = []
        while self._again and len(picked) < most and len(aside) < _LONGEST:
            index = self._again[0]
            holders = self._holders.get(index, [])
            if index >= self._limit:
                break
            needless = index < self.position or index in self._items or self._had(index)
            if needless or len(holders) >= _HOLDERS or index in picked[-1:]:
                heapq.heappop(self._again)
            elif any(lease.worker is own for lease in holders):
                aside.append(heapq.heappop(self._again))
            elif picked and (index != picked[-1] + 1 or not index % self.steps_per_epoch):
                break
            else:
                picked.append(heapq.heappop(self._again))
        for index in aside:
            heapq.heappush(self._again, index)
        self.reissued += len(picked)
        return picked

    def _pick_fresh(self, most: int) -> list[int]:
        """Neighbouring steps of one epoch that nobody has had yet."""
        limit = self._limit
        at = max(self._fresh, self.position)
        while at < limit and self._cared_for(at):
            at += 1
        first = at
        while at < limit and at - first < most and not self._cared_for(at):
            at += 1
            if not at % self.steps_per_epoch:
                break
        self._fresh = at
        return list(range(first, at))

    def _cared_for(self, index: int) -> bool:
        return index in self._items or index in self._holders or self._had(index)

    def _lend(self, own: _Worker, indexes: list[int], now: float) -> Grant:
        if not own.held:  # it had nothing to do: that time does not count
            own.since = now - own.busy
        own.wanted -= len(indexes)
        own.held += len(indexes)
        seconds = self._unmeasured
        if (speed := own.speed) is not None and speed > 0:
            seconds = min(self._unmeasured * 4, max(self._shortest, _LATE * own.held / speed))
        again = max([len(self._holders.get(index, [])) for index in indexes])
        seconds *= 2**again  # if all are this slow, it must not go round and round
        self._numbers += 1
        lease = _Lease(self._numbers, own, set(indexes), now + seconds, now + _PATIENCE * seconds)
        own.leases[lease.number] = lease
        for index in indexes:
            self._holders.setdefault(index, []).append(lease)
        epoch, first = divmod(indexes[0], self.steps_per_epoch)
        return Grant(lease.number, epoch, first, first + len(indexes), seconds)

    def _expire(self, now: float) -> None:
        """Steps of leases that are late may be lent again; whoever held them may still bring them."""
        for own in self._workers.values():
            for lease in own.leases.values():
                if lease.expires <= now < lease.latest and self.arriving(own.name):
                    lease.expires = min(now + self._shortest, lease.latest)
                elif lease.expires <= now and not lease.expired:
                    lease.expired = True
                    own.stalled = len(self._workers) > 1
                    own.speed = None if own.speed is None else own.speed / 2
                    for index in lease.open:
                        heapq.heappush(self._again, index)

    def _give_back(self, lease: _Lease, indexes: set[int]) -> None:
        for index in indexes:
            self._drop(lease, index)
            self._holders[index].remove(lease)
            if not self._holders[index]:
                del self._holders[index]
            heapq.heappush(self._again, index)

    def _settle(self, indexes: Sequence[int], by: _Worker | None = None) -> None:
        """Nobody needs to load these steps any more."""
        for index in indexes:
            for lease in self._holders.pop(index, ()):
                self._drop(lease, index)
                if lease.worker is not by and not lease.open:
                    self._cancelled.append((lease.worker.name, lease.number))

    def _drop(self, lease: _Lease, index: int) -> None:
        lease.open.discard(index)
        lease.worker.held -= 1
        if not lease.open:
            lease.worker.leases.pop(lease.number, None)

    def _measure(self, own: _Worker, now: float) -> None:
        speed = own.counted / (now - own.since)
        own.speed = speed if own.speed is None else 0.7 * own.speed + 0.3 * speed
        own.since, own.counted, own.busy = now, 0, 0.0
