"""The GPU side of one connection: a thread that receives batches into place, and passes on what the hub decides.

Before the peer has proved that it belongs to this run it gets a few seconds and a few hundred bytes, no more.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from distributed_training._version import __version__
from distributed_training.data.base import Batch
from distributed_training.feed.arrivals import Arrival
from distributed_training.feed.channel import Channel
from distributed_training.feed.compression import CODECS, decompress
from distributed_training.feed.credit import Window
from distributed_training.feed.hub import Hub
from distributed_training.feed.shared import Segments, host_id
from distributed_training.feed.tensors import as_tensor
from distributed_training.runtime.errors import DistributedTrainingError, FeedError
from distributed_training.wire import Authenticated, Connection, Lost, PeerError, Reason, Role
from distributed_training.wire import Batch as WireBatch
from distributed_training.wire.messages import (
    Blocked,
    Error,
    Goodbye,
    Join,
    NoWork,
    Ping,
    Pong,
    Refused,
    Release,
    Request,
    SampleFailed,
    Welcome,
    Work,
)

if TYPE_CHECKING:
    from distributed_training.feed.buffers import BufferPool
    from distributed_training.feed.door import Door
    from distributed_training.wire.events import Event
    from distributed_training.wire.fields import Fact

logger = logging.getLogger(__name__)

_BACKLOG = 4096  # pieces that wait to be sent to a peer that does not read
_LEAVING = 2.0  # seconds that a peer has to say goodbye


class Session:
    """One connection from its first byte to its last."""

    def __init__(
        self,
        channel: Channel,
        hub: Hub,
        *,
        token: bytes | None,
        fingerprint: bytes,
        pool: BufferPool,
        door: Door,
        on_end: Callable[[Session], None],
    ) -> None:
        self.name = channel.peer
        self.thread = threading.Thread(target=self._run, name=f"feed {channel.peer}", daemon=True)
        self.window = Window()
        self.shared = False
        self.admitted = self.proved = self.aborted = False
        self._channel, self._hub, self._door, self._on_end = channel, hub, door, on_end
        self._segments = Segments() if hub.settings.shared_memory else None
        locate = self._segments.locate if self._segments is not None else None
        self._connection = Connection(
            Role.SERVER,
            token=token,
            binding=fingerprint,
            max_payload=hub.settings.memory,
            allocate=pool.allocate,
            locate=locate,
        )
        self._started = self._heard = time.monotonic()
        self._next_ping = 0.0
        self._pings = 0
        self._failed: dict[tuple[int, int], set[int]] = {}  # samples that it could not load
        self._last_failure: SampleFailed | None = None
        self._ending: Goodbye | None = None
        self._left = 0.0
        self._burst, self._burst_since = 0, 0.0

    def wake(self) -> None:
        """Have the thread look for something to send."""
        self._channel.wake()

    def end(self, goodbye: Goodbye) -> None:
        """Say goodbye, from another thread."""
        self._ending = goodbye
        self._channel.wake()

    def abort(self) -> None:
        """Cut the connection, from another thread."""
        self.aborted = True
        self._channel.abort()

    def _run(self) -> None:
        """Drive the connection until it ends, whatever happens."""
        try:
            self._channel.shake_hands(self._started + self._hub.settings.authentication)
            self._drive()
        except PeerError as error:
            self._refused(f"{error}")
            self._say_last()
        except (OSError, DistributedTrainingError) as error:
            self._refused(f"{type(error).__name__}: {error}")
        except Exception:
            logger.exception("%s: the connection failed on this side", self._channel.peer)
        finally:
            self._hub.leave(self)
            self._channel.close()
            if self._segments is not None:
                self._segments.close()
            self._on_end(self)

    def _refused(self, why: str) -> None:
        if not self.admitted:
            self._door.refuse(self._channel.peer, why)
        elif not self._left:
            logger.warning("%s (%s) is gone: %s", self.name, self._channel.peer, why)

    def _say_last(self) -> None:
        """What the protocol still has to say to a peer that broke the rules; it need not be heard."""
        self._channel.queue(self._connection.data_to_send())
        try:
            self._channel.flush()
        except OSError as error:
            logger.debug("%s: %s", self._channel.peer, error)

    # -- the loop

    def _drive(self) -> None:
        connection, channel = self._connection, self._channel
        while not connection.closed:
            size = channel.receive_into(connection.get_buffer())
            if size is None:
                self._burst_over()
                self._answer()
                if not connection.closed:
                    channel.wait(self._patience())
                continue
            if size == 0:
                connection.receive_eof()
            else:
                self._heard = time.monotonic()
                self._burst += size
                connection.buffer_updated(size)
            if self._take_events():
                self._answer()
        self._say_last()

    def _take_events(self) -> bool:
        """Deal with what arrived; whether there was anything."""
        arrivals: list[Arrival] = []
        any_event = False
        for event in self._connection.events():
            any_event = True
            if isinstance(event, WireBatch):
                if not self._left:
                    arrivals.append(self._arrival(event))
            else:
                self._event(event)
        total = self._connection.receiving.received
        if self.admitted and (arrivals or total != self.window.received):
            self._hub.received(self, total, arrivals)
        return any_event

    def _event(self, event: Event) -> None:
        if isinstance(event, Request):
            self._hub.wants(self, event.steps)
        elif isinstance(event, Release):
            self._released(event)
        elif isinstance(event, Blocked):
            self._hub.blocked(self, event.size)
        elif isinstance(event, Ping):
            self._connection.send(Pong(event.number, event.clock, time.time_ns()))
        elif isinstance(event, Pong):
            self.window.answered(max(0.0, (time.monotonic_ns() - event.clock) / 1e9))
        elif isinstance(event, SampleFailed):
            self._sample_failed(event)
        elif isinstance(event, Join):
            self._admit(event)
        elif isinstance(event, Authenticated):
            self.proved = True
            self._door.proved()
        elif isinstance(event, Goodbye):
            self._said_goodbye(event)
        elif isinstance(event, Lost):
            raise FeedError("the connection broke" if self.admitted else "it left before it had proved anything")
        elif isinstance(event, Error):
            raise FeedError(f"it reports: {event.text}")

    def _admit(self, join: Join) -> None:
        """Let a worker take part, or say why not."""
        connection = self._connection
        if connection.peer is not Role.WORKER:
            self._turn_away(Refused(Reason.ROLE, "this server takes batches for training only"))
            return
        self.name = f"{join.name[:80]}#{secrets.token_hex(2)}"
        refused = self._hub.admit(self, join)
        if refused is not None:
            self._turn_away(refused)
            return
        self.admitted = True
        self.shared = self._segments is not None and join.host == host_id() and bool(join.host)
        codecs = tuple(sorted(set(join.codecs) & CODECS.keys()))
        facts: dict[str, Fact] = {"on_bad_sample": self._hub.on_bad_sample}
        welcome = Welcome(self.name, __version__, facts, codecs, self.shared, self._hub.settings.memory)
        connection.send(welcome)
        logger.info("%s joined from %s%s", self.name, self._channel.peer, " (shared memory)" if self.shared else "")

    def _turn_away(self, refused: Refused) -> None:
        self._connection.send(refused)
        self._refused(refused.text)

    def _said_goodbye(self, goodbye: Goodbye) -> None:
        if not self._left:
            self._left = time.monotonic()
            self._connection.send(Goodbye(Reason.DONE, ""))
            logger.info("%s left%s", self.name, f": {goodbye.text}" if goodbye.text else "")

    # -- batches

    def _arrival(self, batch: WireBatch) -> Arrival:
        """A batch of tensors that are views of the memory it was received into; its ids are those of the plan."""
        hub, share = self._hub, self._hub.share
        assert hub.plan is not None
        if (batch.rank, batch.ranks) != (share.rank, share.ranks) or batch.step >= hub.plan.steps_per_epoch:
            raise PeerError(
                f"a batch of step {batch.step} for rank {batch.rank} of {batch.ranks}, which nobody asked for"
            )
        if batch.compressed:
            decompress(batch)
        step_ids = hub.step_ids(batch.epoch, batch.step)
        ids = step_ids[share.rows(len(step_ids))] if share.ranks > 1 else step_ids
        data = batch.data(as_tensor)
        if bytes(batch.buffers[0]) == ids.tobytes():
            whole = share.batch(step_ids, data)
        else:
            whole = Batch(self._without_failed(batch, ids), data)
        return Arrival(batch.epoch, batch.step, batch.raw_size, batch.seconds, whole)

    def _without_failed(self, batch: WireBatch, planned: np.ndarray) -> np.ndarray:
        """The ids of a batch that lacks samples which could not be loaded; anything else is not what the plan says."""
        failed = self._failed.get((batch.epoch, batch.step), set())
        rest = planned[~np.isin(planned, list(failed))]
        if self._hub.on_bad_sample != "skip" or bytes(batch.buffers[0]) != rest.tobytes():
            raise PeerError(
                f"step {batch.step} of epoch {batch.epoch} came with other samples than the plan has; both sides "
                "need the same release",
                Reason.PLAN,
            )
        return rest

    def _sample_failed(self, event: SampleFailed) -> None:
        self._failed.setdefault((event.epoch, event.step), set()).add(event.sample)
        self._last_failure = event
        self._hub.sample_failed(self, event.epoch, event.step, event.sample, event.text)

    def _released(self, event: Release) -> None:
        last = self._last_failure
        if event.reason is Reason.SAMPLE and last is not None:  # no part of the step can be had
            self._hub.sample_failed(self, last.epoch, last.step, last.sample, last.text, final=True)
        self._hub.released(self, event.lease, event.first)

    # -- what to send, and when

    def _answer(self) -> None:
        """Send what is due: orders of the hub, pings, goodbye."""
        connection, channel, now = self._connection, self._channel, time.monotonic()
        if self._ending is not None and not self._left and not connection.closed:
            self._leave(now)
        elif connection.is_open:
            for message in self._hub.orders(self):
                connection.send(message)
            if now >= self._next_ping:
                self._next_ping = now + self._hub.settings.silence / 3
                self._pings += 1
                connection.send(Ping(self._pings, time.monotonic_ns()))
        channel.queue(connection.data_to_send())
        channel.flush()
        self._check_patience(now)

    def _leave(self, now: float) -> None:
        connection, goodbye = self._connection, self._ending
        assert goodbye is not None
        self._left = now
        if connection.is_open and goodbye.reason is Reason.DONE:
            connection.send(NoWork(Work.FINISHED, 0.0))
        if connection.authenticated:
            connection.send(goodbye)
        else:
            raise FeedError("this side is closing")

    def _patience(self) -> float:
        """Seconds until something has to be done even if nothing happens."""
        now, settings = time.monotonic(), self._hub.settings
        if self._left:
            return self._left + _LEAVING - now
        if not self.admitted:
            return self._started + settings.authentication - now
        return min(self._next_ping, self._heard + settings.silence) - now

    def _check_patience(self, now: float) -> None:
        settings = self._hub.settings
        if self._left:
            if now > self._left + _LEAVING:
                raise FeedError("it did not say goodbye")
        elif not self.admitted:
            if now > self._started + settings.authentication:
                raise FeedError(f"it did not prove that it belongs to this run within {settings.authentication:g} s")
        elif now > self._heard + settings.silence:
            raise FeedError(f"nothing was heard of it for {settings.silence:g} s")
        if self._channel.backlog > _BACKLOG:
            raise FeedError("it does not read what is sent to it")

    def _burst_over(self) -> None:
        """Nothing more is there to read now: so many bytes came without a pause."""
        now = time.monotonic()
        if self._burst > 1 << 18:
            self.window.measured(self._burst, now - self._burst_since)
        self._burst, self._burst_since = 0, now
