"""A stream of bytes to one peer, plain or TLS, driven by one thread that others can wake.

Which side dialled makes no difference here. Nothing blocks but `wait`, and that has a deadline. What is sent and
received may be wrapped into messages on the way (`wrap`), which nobody who uses the channel notices.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import threading
import time
import weakref
from contextlib import suppress

from distributed_training.feed.outgoing import Outgoing

_READ_AT_ONCE = 1 << 20  # bytes, so that what is to be sent is looked at between
_LOOK = 0.005  # seconds after which is looked at what went aside
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


class Channel(Outgoing):
    """One connection's socket. `wake` and `wait_aside` are for any thread, all else for the one that drives it."""

    def __init__(
        self, sock: socket.socket, tls: ssl.SSLContext | None = None, *, serves: bool = False, name: str | None = None
    ) -> None:
        """`name` is the host whose certificate is expected, where the TLS context asks authorities for that."""
        sock.setblocking(False)
        with suppress(OSError):  # not a TCP socket
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer = _name_of(sock)
        if tls is not None:
            sock = tls.wrap_socket(sock, server_side=serves, do_handshake_on_connect=False, server_hostname=name)
        super().__init__(close_in_children(sock))
        self._wanted_by_tls = 0
        self._wakes, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._awake = False
        self._closing = threading.Lock()  # the number of a closed pipe may belong to somebody else at once
        self._poll = select.poll()
        self._poll.register(self._wakes, select.POLLIN)
        self._registered = 0
        self._least = 1
        self._drained = False

    @property
    def own_address(self) -> str:
        """The address of this side; empty where there is none any more."""
        try:
            return str(self._socket.getsockname()[0])
        except OSError:
            return ""

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

    # -- waiting

    def wait(self, seconds: float, missing: int = 0) -> bool:
        """Until something can be received, or sent if there is something to send; until woken; until time is over.
        Whether it was one of the last two.

        While so many bytes are `missing` of a payload, a few of them are not worth waking up for.
        """
        self._drained = False
        if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return seconds <= 0
        least = max(1, min(missing, _WORTH_WAKING)) if not self.encrypted else 1
        if least != self._least:
            self._least = least
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
        if self.goes_aside:
            return self._wait(select.POLLIN, min(seconds, _LOOK))
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
        aside, self._aside = self._aside, None
        if aside is None or self._end_aside(aside):
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
