"""A loader that listens: its workers await the GPU side, which dials (`calling`), instead of dialling themselves.

All workers accept at one socket, which they have from their parent; each takes one connection, and as long as it has
none, whoever comes may try to prove the token, a few at a time. Connections are always WebSockets, so that it is the
GPU side that speaks first and tunnels let it through; who decides and who brings is the same as ever.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distributed_training.feed.accepting import listen_at, own_address
from distributed_training.feed.channel import Channel
from distributed_training.feed.http_upgrade import SERVER_CALLS, LostError, RefusedError, answer_upgrade
from distributed_training.feed.joining import Joined, guest_connection, join_message, prove, say_join
from distributed_training.feed.pairing import PairingLink, is_loopback, new_token
from distributed_training.feed.tls import Certificate, make_certificate
from distributed_training.runtime.errors import DistributedTrainingError, FeedError
from distributed_training.wire import PeerError, Role

if TYPE_CHECKING:
    from distributed_training.feed.settings import LoaderSettings
    from distributed_training.wire.fields import Fact

logger = logging.getLogger(__name__)

_PROVE = 5.0  # seconds that a caller has to prove the token
_WELCOME = 10.0  # seconds that it has for the rest
_AT_A_TIME = 8  # callers that may try at once
_ALONE = 0.25  # seconds that one has before another may try, too: the next call is most likely for another worker
_LOOK = 1.0
_SAY_EVERY = 5.0  # seconds between two lines about callers that are turned away


class HomeDoor:
    """Where the workers of a loader listen. Made before they are forked; each of them calls `join`."""

    def __init__(
        self,
        host: str = "0.0.0.0",
        port: int = 0,
        *,
        token: bytes | None = None,
        certificate: Certificate | None = None,
        behind_proxy: bool = False,
    ) -> None:
        """Off this machine a token and a certificate are needed; both are made if they are not given. `behind_proxy`: a
        tunnel on this machine has the certificate, and a token is needed though the host is this machine."""
        if behind_proxy:
            token = token or new_token()
        elif not is_loopback(host):
            token, certificate = token or new_token(), certificate or make_certificate()
        self._token, self._certificate = token, certificate
        self._tls = certificate.server_context() if certificate is not None else None
        self._binding = bytes.fromhex(certificate.fingerprint) if certificate is not None else b""
        self._listening = listen_at(host, port)
        self._listening.setblocking(False)
        self.host, self.port = host, int(self._listening.getsockname()[1])

    def link(self, host: str | None = None) -> PairingLink:
        """What the GPU side needs to connect; `host` is the name of this machine as that side sees it."""
        name = host or (self.host if self.host not in ("0.0.0.0", "::", "") else own_address())
        fingerprint = self._certificate.fingerprint if self._certificate is not None else None
        return PairingLink(name, self.port, self._token, fingerprint, "ws")

    @property
    def address(self) -> str:
        """For messages."""
        return f"the GPU side that calls at port {self.port}"

    def close(self) -> None:
        """Listen no more."""
        self._listening.close()

    def join(self, facts: dict[str, Fact], dataset: str, settings: LoaderSettings) -> Joined:
        """Await the GPU side for as long as the settings say. RefusedError where it does not take this loader."""
        calls, since = _Calls(self, facts, dataset, settings), time.monotonic()
        try:
            while True:
                joined = calls.look()
                if joined is not None:
                    return joined
                waited = time.monotonic() - since
                if waited > settings.patience:
                    raise FeedError(f"gave up after {waited:.0f} s: no GPU side called at port {self.port}; start it")
        finally:
            calls.close()

    # -- one call, in a thread of its own

    def fileno(self) -> int:
        """For `select.poll`: ready when somebody calls."""
        return self._listening.fileno()

    def accept(self) -> Channel | None:
        """The next caller, if one is there and no other worker takes it."""
        try:
            sock = self._listening.accept()[0]
        except (BlockingIOError, ConnectionError):
            return None
        try:
            return Channel(sock, self._tls, serves=True)
        except OSError:  # it is gone already
            sock.close()
            return None

    def open(self, channel: Channel, settings: LoaderSettings, deadline: float) -> tuple[Joined, PairingLink]:
        """Take a caller as far as both have proved the token. The link names it, for messages."""
        try:
            channel.shake_hands(deadline)
            answer_upgrade(channel, deadline, b"", SERVER_CALLS)
            joined = Joined(channel, guest_connection(Role.WORKER, self._token, self._binding, settings))
            host, _, port = channel.peer.rpartition(":")
            caller = PairingLink(host, int(port), self._token)
            prove(joined, caller, deadline)
            return joined, caller
        except BaseException:
            channel.close()
            raise


@dataclass
class _Call:
    channel: Channel
    thread: threading.Thread
    since: float


class _Calls:
    """The callers that try to prove the token; the first one that does gets the worker."""

    def __init__(self, door: HomeDoor, facts: dict[str, Fact], dataset: str, settings: LoaderSettings) -> None:
        self._door, self._settings = door, settings
        self._facts, self._dataset = facts, dataset
        self._lock = threading.Lock()
        self._calls: list[_Call] = []
        self._busy = False  # with one that has proved the token
        self._joined: Joined | None = None
        self._error: DistributedTrainingError | None = None
        self._said = -_SAY_EVERY
        self._wakes, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def look(self) -> Joined | None:
        """Wait a while for callers and what comes of them."""
        poll = select.poll()
        poll.register(self._wakes, select.POLLIN)
        with self._lock:
            now = time.monotonic()
            young = any(now - call.since < _ALONE for call in self._calls)
            if not (self._busy or young or len(self._calls) >= _AT_A_TIME):
                poll.register(self._door, select.POLLIN)
        for number, _ in poll.poll((_ALONE / 5 if young else _LOOK) * 1000):
            if number != self._wakes:
                self._begin()
        with suppress(BlockingIOError):
            os.read(self._wakes, 4096)
        with self._lock:
            if self._error is not None:
                raise self._error
            joined, self._joined = self._joined, None
            return joined

    def _begin(self) -> None:
        channel = self._door.accept()
        if channel is not None:
            thread = threading.Thread(target=self._run, args=(channel,), name="feed caller", daemon=True)
            with self._lock:
                self._calls.append(_Call(channel, thread, time.monotonic()))
            thread.start()

    def _run(self, channel: Channel) -> None:
        try:
            self._serve(channel)
        except RefusedError as error:
            with self._lock:
                self._error = error
        except (OSError, PeerError, DistributedTrainingError) as error:
            self._turned_away(error)
        except Exception:
            logger.exception("a call failed on this side")
        finally:
            with self._lock:
                self._forget(channel)
                if self._waker >= 0:
                    os.write(self._waker, b".")

    def _forget(self, channel: Channel) -> None:
        self._calls = [call for call in self._calls if call.channel is not channel]

    def _serve(self, channel: Channel) -> None:
        try:
            joined, caller = self._door.open(channel, self._settings, time.monotonic() + _PROVE)
        except RefusedError as error:  # of somebody who has proved nothing
            raise LostError(str(error)) from None
        with self._lock:
            mine = not self._busy and self._waker >= 0
            self._busy = self._busy or mine
        if not mine:
            joined.channel.close()  # another one was quicker; it dials again and finds another worker
            return
        try:
            message = join_message(self._facts, self._dataset, self._settings)
            say_join(joined, caller, message, time.monotonic() + _WELCOME)
        except BaseException:
            joined.channel.close()
            with self._lock:
                self._busy = False
            raise
        with self._lock:
            self._joined = joined
            self._forget(channel)  # or it would be ended with the others

    def _turned_away(self, error: Exception) -> None:
        with self._lock:
            now = time.monotonic()
            say = now - self._said > _SAY_EVERY and self._waker >= 0
            self._said = now if say else self._said
        if say and not isinstance(error, LostError):
            logger.warning("a caller was turned away: %s", error)

    def close(self) -> None:
        """End all calls but the one that got the worker."""
        with self._lock:
            calls = list(self._calls)
            os.close(self._wakes)
            os.close(self._waker)
            self._wakes = self._waker = -1
        for call in calls:
            call.channel.abort()
        for call in calls:
            call.thread.join(1.0)
