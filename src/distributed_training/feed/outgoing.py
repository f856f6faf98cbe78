"""What is to be sent on one socket, in order, and how it gets away: plain or encrypted, as it is or wrapped into
messages, now or aside."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Protocol, cast

from distributed_training.feed.scattered import send_scattered
from distributed_training.feed.sending_aside import SendingAside, can_send_aside
from distributed_training.wire.batches import Sendable

_MOST_VIEWS = 512  # of one sendmsg; the system's own limit is 1024
_RECORD = 16 << 10  # bytes of a TLS record
_FEW_VIEWS, _CALL = 128, 1 << 20  # more than a few views of one sendmsg only up to so many bytes: each has its price
_SEND_AT_ONCE = 4 << 20  # so that what arrives is looked at between
_ASIDE_AT_ONCE = 4 << 20  # bytes on their way aside, from which on no more are added
_LAST_WORDS = 0.5  # seconds that what went aside last has to get away
_END = 2.0  # seconds in which the system has to let go of a connection that was shut down

Read = Callable[[list[memoryview]], int | None]
"""Reads from the stream into one buffer after the other: as `Channel.receive_into`."""


class Wrapping(Protocol):
    """How the bytes of a stream are wrapped into messages (see `websocket`). Called by the thread of the channel."""

    def receive_into(self, buffer: memoryview, read: Read) -> int | None:
        """As `Channel.receive_into`, given what reads from the stream itself."""

    def encode(self, views: list[memoryview]) -> list[memoryview]:
        """Take some of the views, from the front, and give what is to be sent for them; empty where there is nothing.

        What was given before is sent by now.
        """

    def farewell(self) -> bytes:
        """What is said last."""


class Outgoing:
    """The half of a channel that sends. Used by one thread at a time, but for `wait_aside`."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._encrypts = isinstance(sock, ssl.SSLSocket)
        self._wrapping: Wrapping | None = None
        self._out: list[Sendable] = []
        self._sent = 0  # bytes of the first part that are gone
        self._bare: list[memoryview] = []  # to be wrapped
        self._flags = 0
        self._aside: SendingAside | None = None
        self._left_aside = 0  # so many parts of `_out` were left to it
        self._leaves = self._behind = False

    @property
    def encrypted(self) -> bool:
        """Whether what is sent has to be encrypted first."""
        return self._encrypts

    @property
    def wrapped(self) -> bool:
        """Whether bytes are wrapped into messages."""
        return self._wrapping is not None

    def wrap(self, wrapping: Wrapping) -> None:
        """From now on wrap what is sent, and unwrap what comes. Nothing may be waiting to be sent."""
        self._wrapping = wrapping

    @property
    def scatters(self) -> bool:
        """Whether bytes that lie in many places are sent from there; else each place has to be looked at."""
        return not self._encrypts and self._wrapping is None

    def queue(self, parts: list[Sendable]) -> None:
        """Have these sent by `flush`."""
        if self.scatters:
            self._out += parts
            return
        out = self._out if self._wrapping is None else self._bare
        for part in parts:
            if isinstance(part, memoryview):
                out.append(part)
            else:
                out += part.pieces()

    @property
    def pending(self) -> bool:
        """Whether something is still to be sent."""
        return bool(self._out or self._bare)

    @property
    def full(self) -> bool:
        """Whether what is queued now could not be sent now."""
        if self._aside is not None and self._aside.busy:  # which has to end before anything can be sent here
            return self._aside.size >= _ASIDE_AT_ONCE or not self._leaves
        return self.pending

    @property
    def behind(self) -> bool:
        """Whether the connection takes less than there is: something was left over when `flush` was called last."""
        return self._behind if self.goes_aside else self.pending

    @property
    def backlog(self) -> int:
        """Pieces that are still to be sent."""
        return len(self._out) + len(self._bare)

    def flush(self, *, aside: bool = False) -> int:
        """Send what can be sent now, or have it sent `aside`, while the caller goes on; how many bytes have gone."""
        total = 0
        if self._aside is not None:
            total = self._aside.gone()
            self._forget(total)
            self._leaves, self._behind = aside, self._aside.busy
            if aside or self._behind:  # nothing must come before what is on its way
                self._leave_aside(self._aside)
                return total
        while (self._out or self._encode()) and total < _SEND_AT_ONCE:
            try:
                sent, wanted = self._send_some()
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                break
            total += sent
            self._forget(sent)
            if sent < wanted:  # to try again at once would cost much and send nothing
                break
        return total

    def _leave_aside(self, aside: SendingAside) -> None:
        views: list[memoryview] = []
        for part in self._out[self._left_aside :]:
            views += [part] if isinstance(part, memoryview) else part.pieces()
        aside.send(list(_without(self._sent, views)) if not self._left_aside else views)
        self._left_aside = len(self._out)

    def _encode(self) -> bool:
        """Wrap what is next; whether there is something."""
        if self._wrapping is not None:
            self._out += self._wrapping.encode(self._bare)
        return bool(self._out)

    def _send_some(self) -> tuple[int, int]:
        """(bytes sent, bytes that were to be sent) of one call."""
        if isinstance(self._socket, ssl.SSLSocket):
            return self._send_records(self._socket, self._record())
        parts: list[Sendable] = []
        views: list[memoryview] = []
        size = -self._sent
        for part in self._out:
            parts.append(part)
            size += len(part)
            if isinstance(part, memoryview):
                views.append(part)
            if len(parts) >= _FEW_VIEWS and (size >= _CALL or len(parts) == _MOST_VIEWS):
                break
        if len(views) < len(parts):
            return send_scattered(self._socket.fileno(), parts, self._sent, self._flags)
        if self._sent:
            views[0] = views[0][self._sent :]
        return self._socket.sendmsg(views, (), self._flags), size

    @staticmethod
    def _send_records(sock: ssl.SSLSocket, view: memoryview) -> tuple[int, int]:
        """As `_send_some`: a view record by record, which is what OpenSSL takes at a time."""
        sent = sock.write(view)
        try:
            while sent < len(view) and sent < _SEND_AT_ONCE:
                sent += sock.write(view[sent:])
        except OSError:
            pass  # no room now, or an end: the next call offers the same bytes again
        return sent, len(view)

    def _record(self) -> memoryview:
        """What goes into the next TLS record: a large view as it is, small ones together.

        After an attempt that could not be finished OpenSSL wants the same bytes again: nothing was forgotten, so they
        are.
        """
        out = cast("list[memoryview]", self._out)  # `queue` has taken apart what was scattered
        first = out[0][self._sent :]
        if len(first) >= _RECORD or len(out) == 1:
            return first
        joined, size = [first], len(first)
        for view in out[1:]:
            if size + len(view) > _RECORD:
                break
            joined.append(view)
            size += len(view)
        if len(joined) > 1:  # once made, the joined bytes take the place of their pieces, for the same reason
            out[: len(joined)] = [memoryview(b"".join(joined))]
            self._sent = 0
        return out[0][self._sent :]

    def _forget(self, sent: int) -> None:
        sent += self._sent
        gone = 0
        for view in self._out:
            if sent < len(view):
                break
            sent -= len(view)
            gone += 1
        del self._out[:gone]
        self._sent = sent
        self._left_aside = max(0, self._left_aside - gone)

    # -- aside

    def allow_aside(self) -> bool:
        """From now on `flush` may leave bytes to a thread of the C library; False where that cannot be."""
        if not self.scatters or not can_send_aside():
            return False
        os.set_blocking(self._socket.fileno(), True)
        self._flags = socket.MSG_DONTWAIT  # of every call that is made here
        self._aside = SendingAside(self._socket.fileno())
        return True

    @property
    def goes_aside(self) -> bool:
        """Whether bytes are on their way that were left to that thread. Nobody hears of it when they have gone."""
        return self._aside is not None and self._aside.busy

    @property
    def bytes_aside(self) -> int:
        """How many of those there are, in memory that is not free yet."""
        return self._aside.size if self._aside is not None else 0

    def wait_aside(self, seconds: float) -> bool:
        """Until some of those have gone; from any thread. False where there are none."""
        return self._aside is not None and self._aside.wait(seconds)

    def _end_aside(self, aside: SendingAside) -> bool:
        """Have nothing sent any more; whether that is so now."""
        aside.wait(_LAST_WORDS)  # nearly always there is none
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        return aside.end(_END)


def _without(skipped: int, views: list[memoryview]) -> Iterator[memoryview]:
    """These but for so many bytes at the front."""
    for view in views:
        if skipped < len(view):
            yield view[skipped:] if skipped else view
        skipped = max(0, skipped - len(view))
