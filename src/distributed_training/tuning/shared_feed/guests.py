"""A trial as the service sees it: a connection, what it waits for, and what it will read next."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

import numpy as np

from distributed_training.data.base import Share
from distributed_training.data.plan import Plan, derive_key
from distributed_training.runtime.errors import FeedError
from distributed_training.tuning.shared_feed.messages import MOST_IDS, Message, numbers
from distributed_training.tuning.shared_feed.shelves import ABSENT, Shelf

_AT_ONCE = 4096  # ids of steps to come that are looked at together


@dataclass
class Request:
    """Samples that a trial waits for."""

    part: str
    key: int
    ids: np.ndarray
    given_up: bool = False
    """Whether there is no room for what is not here: the trial is to load it for itself."""

    @classmethod
    def read(cls, message: Message, samples: int) -> Request:
        """A request from a message, for a dataset of so many samples."""
        ids = numbers(message["ids"], np.int64)
        if not 0 < len(ids) <= MOST_IDS or ids.min() < 0 or ids.max() >= samples:
            raise FeedError(f"a request for samples that are none of the {samples} of {message['part']}")
        return cls(str(message["part"]), int(message["key"]), ids)


@dataclass(eq=False)
class Guest:
    """One connection of a trial, which may have several: one for each of its processes that read."""

    peer: socket.socket
    trial: str = ""
    request: Request | None = None
    holding: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    """Slots of its last answer, which it reads until it says something else."""


class Reader:
    """An epoch that a trial reads: which samples it will want, in which order."""

    def __init__(self, guest: Guest, part: str, plan: Plan, share: Share, epoch: int, start: int) -> None:
        self.guest, self.part, self.key = guest, part, derive_key(plan.seed, epoch)
        self._plan, self._share, self._epoch, self._step = plan, share, epoch, start
        self._ids = np.empty(0, np.int64)  # next ones, not looked at yet
        self.total = -(-(plan.samples - start * plan.batch_size) // share.ranks)
        self.had = self.taken = 0
        """Samples that the trial got, and those that are looked after for it."""

    @classmethod
    def read(cls, guest: Guest, message: Message, samples: int) -> Reader:
        """A reader from a message."""
        size, seed, shuffle, drop_last = message["plan"]
        plan = Plan(samples, int(size), int(seed), bool(shuffle), bool(drop_last))
        rank, ranks = map(int, message["share"])
        epoch, start = int(message["epoch"]), int(message["start"])
        if not 0 <= rank < ranks or epoch < 0 or not 0 <= start <= plan.steps_per_epoch:
            raise FeedError(f"no such share of an epoch: rank {rank} of {ranks}, epoch {epoch}, step {start}")
        return cls(guest, str(message["part"]), plan, Share(rank, ranks), epoch, start)

    def next_absent(self, shelf: Shelf, most: int) -> np.ndarray:
        """The next samples that nobody has loaded or loads, up to so many. They are the next until somebody does."""
        while True:
            if not len(self._ids):
                self._more()
                if not len(self._ids):
                    return self._ids
            absent = np.flatnonzero(shelf.find(self._ids, self.key) == ABSENT)
            skipped = len(self._ids) if not len(absent) else int(absent[0])
            self.taken += skipped
            self._ids = self._ids[skipped:]
            if len(absent):
                return self._ids[absent[:most] - skipped]

    def _more(self) -> None:
        last = min(self._step + max(1, _AT_ONCE // self._plan.batch_size), self._plan.steps_per_epoch)
        if last <= self._step:
            return
        ids = self._plan.span(self._epoch, self._step, last)
        self._step = last
        if self._share.ranks > 1:
            size = self._plan.batch_size
            steps = [ids[at : at + size] for at in range(0, len(ids), size)]
            ids = np.concatenate([step[self._share.rows(len(step))] for step in steps])
        self._ids = ids
