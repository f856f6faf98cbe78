"""Clients take turns on one model: their batches wait here, within one bound on memory, and the model takes them.

The next turn belongs to the client that had least of the model so far, in bytes of batches: so a client with large
batches, or many of them, holds up nobody. Who was idle has saved nothing up. Each client may have its part of the
memory filled with batches that wait; only then does it get no further credit. A client that does not fetch its results
gets no turns until it does.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from distributed_training.data.base import Batch
from distributed_training.feed.credit import Credit, Window
from distributed_training.feed.settings import FeedSettings
from distributed_training.wire import PackedBatch, Reason

_RESULTS = 8 << 20  # bytes of results that may wait for a client before it gets no more turns
_MANY = 1024  # and their number


class Seat(Protocol):
    """What is needed to know of a client's connection."""

    name: str
    window: Window

    def wake(self) -> None:
        """Have its thread look for something to send."""


@dataclass(eq=False)
class Waiting:
    """A client with what waits for it and of it. Guarded by the lock of `Turns`."""

    seat: Seat
    turns: deque[Turn] = field(default_factory=deque)
    held: int = 0
    """Bytes of its batches that are here."""
    used: int = 0
    """Bytes of its batches that the model took."""
    samples: int = 0
    """Samples that were computed for it."""
    results: deque[PackedBatch] = field(default_factory=deque)
    results_size: int = 0
    failed: tuple[Reason, str] | None = None
    """Why its task cannot go on."""


@dataclass(eq=False)
class Turn:
    """A batch of a client for the model."""

    client: Waiting
    options: Any
    """What the client asked for, as the service read it."""
    step: int
    batch: Batch
    size: int


@dataclass(frozen=True)
class ServiceFigures:
    """What a service did so far."""

    seconds: float = 0.0
    clients: int = 0
    """Connected now."""
    tasks: int = 0
    """Tasks whose clients have all their results and left."""
    batches: int = 0
    samples: int = 0
    received: int = 0
    """Payload that came, in bytes."""
    sent: int = 0
    """Payload of results, in bytes."""
    waited: float = 0.0
    """Seconds that the model waited for batches while a client was there."""


class Turns:
    """Shared by the connections of all clients and the one thread that has the model."""

    def __init__(self, mode: str, settings: FeedSettings, read_task: Callable[[Mapping[str, Any]], Any]) -> None:
        """`read_task` turns what a client asks for into options, or raises a DistributedTrainingError."""
        self.mode, self.settings, self.read_task = mode, settings, read_task
        self.facts: dict[str, Any] = {}
        """What clients are told when they join."""
        self._lock = threading.Condition()
        self._clients: dict[Seat, Waiting] = {}
        self._credit = Credit(settings.memory)
        self._clock = 0  # what the client that had the last turn had used
        self._stopped = False
        self._since = time.monotonic()
        self._tasks = self._batches = self._samples = self._received = self._sent = 0
        self._waited = 0.0

    # -- connections

    def join(self, seat: Seat) -> Waiting | None:
        """A client is there; None when no more are taken."""
        with self._lock:
            if self._stopped:
                return None
            client = self._clients[seat] = Waiting(seat)
            self._credit.join(seat.window)
            return client

    def leave(self, seat: Seat, *, content: bool) -> None:
        """A client is gone. `content`: it had all that it wanted."""
        with self._lock:
            client = self._clients.pop(seat, None)
            if client is None:
                return
            self._credit.leave(seat.window)
            self._drop(client)
            self._tasks += content
            self._wake_blocked()
            self._lock.notify_all()

    def received(self, client: Waiting, total: int, turns: list[Turn]) -> None:
        """Batches came. `total` is all payload of the connection so far."""
        with self._lock:
            if client.seat not in self._clients:
                return
            self._received += self._credit.arrived(client.seat.window, total)
            if client.failed is not None or not turns:
                return
            if not client.turns:
                client.used = max(client.used, self._clock)
            client.turns.extend(turns)
            size = sum(turn.size for turn in turns)
            client.held += size
            self._credit.waiting += size
            self._lock.notify_all()

    def blocked(self, client: Waiting, size: int) -> None:
        """A client has a batch that needs more credit than it has."""
        with self._lock:
            client.seat.window.blocked = size

    def credit(self, client: Waiting) -> int | None:
        """The new limit to tell a client; None while it stays as it is. DataError for a batch that can never fit."""
        with self._lock:
            if client.seat not in self._clients or client.failed is not None:
                return None
            if client.held and client.held >= self.settings.memory // 2 // len(self._clients):
                return None
            return self._credit.grant(client.seat.window)

    def results(self, client: Waiting, room: int, most: int) -> tuple[list[PackedBatch], int]:
        """Results to send now, as many as fit; and the size of the first one if it does not."""
        taken: list[PackedBatch] = []
        with self._lock:
            while client.results and len(taken) < most and client.results[0].size <= room:
                result = client.results.popleft()
                taken.append(result)
                room -= result.size
                client.results_size -= result.size
                self._sent += result.size
            if taken and client.turns:
                self._lock.notify_all()
            too_large = client.results[0].size if client.results and not taken else 0
        return taken, too_large

    def open(self, client: Waiting) -> bool:
        """Whether something of this client waits still, or is being computed."""
        with self._lock:
            return bool(client.held or client.results)

    # -- the model

    def take(self, seconds: float) -> Turn | None:
        """The next turn; None if none came in this time, or no more will."""
        start = time.monotonic()
        with self._lock:
            there = bool(self._clients)
            self._lock.wait_for(lambda: self._stopped or self._eligible() is not None, seconds)
            if there and seconds:
                self._waited += time.monotonic() - start
            client = self._eligible()
            if client is None or self._stopped:
                return None
            turn = client.turns.popleft()
            self._clock = client.used
            client.used += max(1, turn.size)
            return turn

    def answered(self, turn: Turn, result: PackedBatch) -> None:
        """What the model says of a turn's batch, on its way to the client."""
        client = turn.client
        with self._lock:
            self._release(turn)
            self._batches += 1
            self._samples += len(turn.batch.ids)
            client.samples += len(turn.batch.ids)
            if client.seat in self._clients and client.failed is None:
                client.results.append(result)
                client.results_size += result.size
            self._wake_blocked()
        client.seat.wake()

    def failed(self, turn: Turn, reason: Reason, text: str) -> None:
        """A batch cannot be computed: the client's task ends. Nobody else is concerned."""
        with self._lock:
            self._release(turn)
            self.give_up(turn.client, reason, text)
            self._wake_blocked()

    def give_up(self, client: Waiting, reason: Reason, text: str) -> None:
        """A client's task cannot go on. Its batches are forgotten, and it is told why."""
        with self._lock:
            if client.failed is None:
                client.failed = (reason, text)
                self._drop(client)
        client.seat.wake()

    def stop(self) -> None:
        """End all waits, and take no more clients."""
        with self._lock:
            self._stopped = True
            self._lock.notify_all()

    @property
    def stopped(self) -> bool:
        """Whether the service is ending."""
        return self._stopped

    def figures(self) -> ServiceFigures:
        """What happened so far."""
        with self._lock:
            return ServiceFigures(
                seconds=time.monotonic() - self._since,
                clients=len(self._clients),
                tasks=self._tasks,
                batches=self._batches,
                samples=self._samples,
                received=self._received,
                sent=self._sent,
                waited=self._waited,
            )

    @property
    def memory_held(self) -> int:
        """Bytes of batches that are here or may come at any moment."""
        with self._lock:
            return self._credit.held

    # -- with the lock held

    def _eligible(self) -> Waiting | None:
        """The client whose turn it is."""
        ready = [
            client
            for client in self._clients.values()
            if client.turns and client.results_size < _RESULTS and len(client.results) < _MANY
        ]
        return min(ready, key=lambda client: client.used) if ready else None

    def _release(self, turn: Turn) -> None:
        turn.client.held -= turn.size
        self._credit.waiting -= turn.size

    def _drop(self, client: Waiting) -> None:
        for turn in client.turns:
            self._release(turn)
        client.turns.clear()
        client.results.clear()
        client.results_size = 0

    def _wake_blocked(self) -> None:
        for seat in self._clients:
            if seat.window.blocked > seat.window.promised:
                seat.wake()
