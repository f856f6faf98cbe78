"""A stream of bytes to one peer, plain or TLS, driven by one thread that others can wake.

Which side dialled makes no difference here. Nothing blocks but `wait`, and that has a deadline. What is sent and
received may be wrapped into messages on the way (`wrap`), which nobody who uses the channel notices.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import struct
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, cast

from distributed_training.feed.scattered import send_scattered
from distributed_training.wire.batches import Sendable

_MOST_VIEWS = 512  # of one sendmsg; the system's own limit is 1024
_RECORD = 16 << 10  # bytes of a TLS record
_FEW_VIEWS, _CALL = 128, 1 << 20  # more than a few views of one sendmsg only up to so many bytes: each has its price
_SEND_AT_ONCE = 4 << 20  # so that what arrives is looked at between
_READ_AT_ONCE = 1 << 20  # likewise
_MOMENT = 10_000  # microseconds that a patient `flush` waits at most
_WORTH_WAKING = 128 << 10  # bytes of a payload; each time takes the interpreter from whoever computes

_SOCKETS: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_in_children(sock: socket.socket) -> socket.socket:
    """A process forked from this one must not keep the connection open: the peer would not see that we are gone."""
    _SOCKETS.add(sock)
    return sock


def _close_inherited() -> None:
    for sock in list(_SOCKETS):
        with suppress(OSError):
            os.close(sock.detach())


os.register_at_fork(after_in_child=_close_inherited)


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


class Channel:
    """One connection's socket. `wake` may be called by any thread; all else by the one that drives it."""

    def __init__(
        self, sock: socket.socket, tls: ssl.SSLContext | None = None, *, serves: bool = False, name: str | None = None
    ) -> None:
        """`name` is the host whose certificate is expected, where the TLS context asks authorities for that."""
        sock.setblocking(False)
        with suppress(OSError):  # not a TCP socket
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer = _name_of(sock)
        self._tls = tls is not None
        if tls is not None:
            sock = tls.wrap_socket(sock, server_side=serves, do_handshake_on_connect=False, server_hostname=name)
        self._socket = close_in_children(sock)
        self._wanted_by_tls = 0
        self._wakes, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._awake = False
        self._closing = threading.Lock()  # the number of a closed pipe may belong to somebody else at once
        self._poll = select.poll()
        self._poll.register(self._wakes, select.POLLIN)
        self._registered = 0
        self._least = 1
        self._drained = False
        self._out: list[Sendable] = []
        self._sent = 0  # bytes of the first view that are gone
        self._flags = 0
        self._wrapping: Wrapping | None = None
        self._bare: list[memoryview] = []  # to be wrapped

    @property
    def wrapped(self) -> bool:
        """Whether bytes are wrapped into messages."""
        return self._wrapping is not None

    def wrap(self, wrapping: Wrapping) -> None:
        """From now on wrap what is sent, and unwrap what comes. Nothing may be waiting to be sent."""
        self._wrapping = wrapping

    @property
    def own_address(self) -> str:
        """The address of this side; empty where there is none any more."""
        try:
            return str(self._socket.getsockname()[0])
        except OSError:
            return ""

    @property
    def encrypted(self) -> bool:
        """Whether what is sent has to be encrypted first."""
        return self._tls

    def learn_patience(self) -> bool:
        """From now on a `flush` may wait for a moment, in the system; False where that cannot be, with TLS."""
        if self._tls or self._wrapping is not None:
            return False
        moment = struct.pack("@ll", 0, _MOMENT)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, moment)
        os.set_blocking(self._socket.fileno(), True)
        self._flags = socket.MSG_DONTWAIT  # of every other call
        return True

    # -- TLS

    def shake_hands(self, deadline: float) -> bytes:
        """Agree on keys, by this time; the certificate of the serving side in binary form. b"" without TLS."""
        if not isinstance(self._socket, ssl.SSLSocket):
            return b""
        while True:
            try:
                self._socket.do_handshake()
                return self._socket.getpeercert(binary_form=True) or b""
            except ssl.SSLWantReadError:
                events = select.POLLIN
            except ssl.SSLWantWriteError:
                events = select.POLLOUT
            self._wait(events, deadline - time.monotonic())
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{self.peer} did not finish the TLS handshake in time")

    # -- bytes

    def receive_into(self, buffer: memoryview) -> int | None:
        """Bytes that came; 0 at the end of the stream, None when there is nothing now."""
        if self._wrapping is not None:
            return self._wrapping.receive_into(buffer, self._read)
        return self._read([buffer])

    def _read(self, buffers: list[memoryview]) -> int | None:
        self._wanted_by_tls = 0
        try:
            if isinstance(self._socket, ssl.SSLSocket):
                return self._read_records(self._socket, buffers[0])
            if len(buffers) > 1:
                return self._socket.recvmsg_into(buffers, 0, self._flags)[0]
            size = self._socket.recv_into(buffers[0], 0, self._flags)
            self._drained = 0 < size < len(buffers[0]) or size >= _WORTH_WAKING
            return size
        except (BlockingIOError, ssl.SSLWantReadError):
            return None
        except ssl.SSLWantWriteError:
            self._wanted_by_tls = select.POLLOUT
            return None
        except ssl.SSLEOFError:
            return 0

    @property
    def drained(self) -> bool:
        """Whether nothing more is likely to be here, by what was read last: then to `wait` costs less than to look."""
        return self._drained and self._wrapping is None

    def _read_records(self, sock: ssl.SSLSocket, buffer: memoryview) -> int:
        """As many records as are here and fit. OpenSSL gives one at a time; each return to the caller costs more."""
        total = sock.recv_into(buffer)
        most = min(len(buffer), _READ_AT_ONCE)
        try:
            while 0 < total < most:
                size = sock.recv_into(buffer[total:])
                total += size
                if not size:
                    break
        except OSError:
            pass  # nothing more now, or at all: the next call finds the same, and what came before it counts
        return total

    @property
    def scatters(self) -> bool:
        """Whether bytes that lie in many places are sent from there; else each place has to be looked at."""
        return not self._tls and self._wrapping is None

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
    def backlog(self) -> int:
        """Pieces that are still to be sent."""
        return len(self._out) + len(self._bare)

    def flush(self, *, patient: bool = False) -> int:
        """Send what can be sent now, or, `patient`, within a moment; how many bytes that was.

        One call that waits in the system takes the interpreter from other threads less often than several that do not.
        """
        total, flags = 0, 0 if patient else self._flags
        while (self._out or self._encode()) and total < _SEND_AT_ONCE:
            try:
                sent, wanted = self._send_some(flags)
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                break
            total += sent
            self._forget(sent)
            if sent < wanted:  # to try again at once would cost much and send nothing
                break
        return total

    def _encode(self) -> bool:
        """Wrap what is next; whether there is something."""
        if self._wrapping is not None:
            self._out += self._wrapping.encode(self._bare)
        return bool(self._out)

    def _send_some(self, flags: int) -> tuple[int, int]:
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
            return send_scattered(self._socket.fileno(), parts, self._sent, flags)
        if self._sent:
            views[0] = views[0][self._sent :]
        return self._socket.sendmsg(views, (), flags), size

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

    # -- waiting

    def wait(self, seconds: float, missing: int = 0) -> bool:
        """Until something can be received, or sent if there is something to send; until woken; until time is over.
        Whether it was one of the last two.

        While so many bytes are `missing` of a payload, a few of them are not worth waking up for.
        """
        self._drained = False
        if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return seconds <= 0
        least = max(1, min(missing, _WORTH_WAKING)) if not self._tls else 1
        if least != self._least:
            self._least = least
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
        return self._wait(select.POLLIN | (select.POLLOUT if self._out else 0) | self._wanted_by_tls, seconds)

    def _wait(self, events: int, seconds: float) -> bool:
        if events != self._registered:
            self._poll.register(self._socket, events)
            self._registered = events
        found = self._poll.poll(max(0.0, seconds) * 1000)
        woken = seconds <= 0 or not found  # a peer that sends all the time must not keep this side from its duties
        for number, _ in found:
            if number == self._wakes:
                with suppress(BlockingIOError):
                    os.read(self._wakes, 4096)
                self._awake = False  # not before: a byte written in between would be lost
                woken = True
        return woken

    def wake(self) -> None:
        """End a `wait`, from another thread."""
        if not self._awake:
            with self._closing:
                if self._waker >= 0:
                    self._awake = True
                    with suppress(BlockingIOError):
                        os.write(self._waker, b".")

    def close(self) -> None:
        """Let go of the connection. Safe to call twice."""
        with suppress(OSError, ValueError):  # a TLS socket that is closed already says the latter
            if self._wrapping is not None and not self.pending:
                self._socket.send(self._wrapping.farewell())  # nobody has learnt patience here
        with suppress(OSError):
            self._socket.close()
        self._out.clear()
        self._bare.clear()
        with self._closing:
            for end in (self._wakes, self._waker):
                if end >= 0:
                    os.close(end)
            self._wakes = self._waker = -1

    def abort(self) -> None:
        """From another thread: have the driving thread see the end of the stream."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self.wake()


def dial(host: str, port: int, timeout: float, tls: ssl.SSLContext | None = None, name: str | None = None) -> Channel:
    """Connect to a peer that listens; `name` as for `Channel`."""
    sock = socket.create_connection((host, port), timeout=timeout)
    try:
        return Channel(sock, tls, name=name)
    except BaseException:
        sock.close()
        raise


def _name_of(sock: socket.socket) -> str:
    try:
        address = sock.getpeername()
    except OSError:
        return "a peer that is gone"
    return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else str(address or "a local peer")
