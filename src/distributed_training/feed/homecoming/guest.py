"""The GPU side of one connection to a loader that keeps a copy of the run: files out, files in.

Called by the connection's own thread; `wake`, `pull`, `done` and `say` by others. A chunk goes only when nothing else
waits to be sent, and no more than the loader gave credit for, which is little: so leases never wait long behind it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

from distributed_training.feed.homecoming.arriving import Arriving
from distributed_training.feed.homecoming.courier import Courier
from distributed_training.feed.homecoming.names import FileName, TransferError, is_identity, read_name
from distributed_training.feed.homecoming.parcels import CHUNK, Parcel, Sending
from distributed_training.wire import Chunk, PeerError, Reason
from distributed_training.wire.messages import BlobDone, BlobOffer, BlobPull, Message

if TYPE_CHECKING:
    from distributed_training.feed.session import Session
    from distributed_training.wire.events import Event
    from distributed_training.wire.fields import Fact

_MOST_OFFERS = 16


class HomeGuest:
    """A loader worker that receives the run's files, and may bring those of an earlier GPU side."""

    def __init__(self, session: Session, courier: Courier, facts: Mapping[str, Fact]) -> None:
        self.name, self.wake = session.name, session.wake
        self.run, self.step = _brought(facts)
        """The run that it brings a checkpoint of, and its step; empty and -1 where it brings none."""
        self.offers: dict[str, tuple[FileName, BlobOffer]] = {}
        """What it brings, by path."""
        self.lost = False
        self._session, self._courier = session, courier
        self._messages: deque[Message] = deque()
        self._offered: tuple[int, Parcel] | None = None
        self._sending: Sending | None = None
        self._pulled: tuple[int, Arriving] | None = None

    # -- by the connection's thread

    def hear(self, event: Event) -> None:
        """Deal with what is about files."""
        if isinstance(event, BlobPull):
            if self._offered is not None and self._offered[0] == event.blob and event.position <= self._offered[1].size:
                self._sending = Sending(event.blob, self._offered[1], event.position)
        elif isinstance(event, BlobDone):
            if self._offered is not None and self._offered[0] == event.blob:
                self._offered = self._sending = None
                self._courier.answered(self, event.blob, event.good, _plain(event.text))
        elif isinstance(event, Chunk):
            self._arrived(event)
        elif isinstance(event, BlobOffer):
            self._brings(event)

    def _brings(self, offer: BlobOffer) -> None:
        if len(self.offers) >= _MOST_OFFERS:
            raise PeerError("it offers more files than a run has", Reason.LIMIT)
        try:
            name = read_name(offer.name)
        except TransferError as error:
            raise PeerError(str(error)) from None
        with self._courier.changed:
            if name.run == self.run:
                self.offers[name.path] = (name, offer)
            self._courier.changed.notify_all()

    def _arrived(self, chunk: Chunk) -> None:
        with self._courier.changed:
            pulled = self._pulled
        if pulled is None or pulled[0] != chunk.blob:
            raise PeerError("a part of a file that nobody asked for")
        try:
            pulled[1].write(chunk.position, chunk.data)
        except TransferError as error:
            raise PeerError(str(error)) from None
        with self._courier.changed:
            self._courier.moved += 1
            if pulled[1].complete:
                self._courier.changed.notify_all()

    def speak(self) -> None:
        """Send what is due."""
        connection = self._session.connection
        while self._messages:
            connection.send(self._messages.popleft())
        if self._offered is None and (found := self._courier.next_parcel(self)) is not None:
            blob, parcel = self._offered = found
            connection.send(BlobOffer(blob, str(parcel.name), parcel.size, parcel.digest))
        if self._sending is not None and self._may_send():
            position, data = self._sending.next(min(CHUNK, connection.sending.available))
            connection.send_chunk(self._sending.blob, position, data)
            self._courier.moved += 1
            if self._sending.over:
                self._sending = None

    def _may_send(self) -> bool:
        return self._session.backlog == 0 and self._session.connection.sending.available > 0

    def patience(self) -> float:
        """Seconds after which `speak` is to be called though nothing happens."""
        return 0.0 if self._sending is not None and self._may_send() else math.inf

    def gone(self) -> None:
        """The connection ended."""
        self.lost = True
        self._courier.leave(self)

    # -- by training, under the courier's lock

    def pull(self, blob: int, arriving: Arriving) -> None:
        """Ask for a file that it brings."""
        self._pulled = (blob, arriving)
        self.say(BlobPull(blob, arriving.position))

    def done(self, blob: int, good: bool, text: str = "") -> None:
        """Say that a file is here, or not wanted."""
        self._pulled = None
        self.say(BlobDone(blob, good, text))

    def say(self, message: Message) -> None:
        """Have a message sent."""
        self._messages.append(message)
        self.wake()


def _brought(facts: Mapping[str, Fact]) -> tuple[str, int]:
    run, step = facts.get("home_run"), facts.get("home_step")
    if isinstance(run, str) and is_identity(run) and type(step) is int and 0 <= step < 10**10:
        return run, step
    return "", -1


def _plain(text: str) -> str:
    """What a peer said as a part of one line of a log."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:500])
