"""The GPU side of a feed: listens, lets in who belongs to the run, and gives the training loop a batch source."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType

import torch

from distributed_training.data.plan import Plan
from distributed_training.feed.accepting import Accepting, own_address
from distributed_training.feed.arrivals import BadSample
from distributed_training.feed.buffers import BufferPool
from distributed_training.feed.calling import Caller
from distributed_training.feed.channel import Channel
from distributed_training.feed.client_session import ClientGuest
from distributed_training.feed.doctor.session import Doctors
from distributed_training.feed.door import Door
from distributed_training.feed.figures import Figures
from distributed_training.feed.guests import MakeGuest, Unwanted
from distributed_training.feed.homecoming.courier import Courier
from distributed_training.feed.hub import Hub
from distributed_training.feed.pairing import PairingLink, is_loopback, new_token
from distributed_training.feed.session import Session
from distributed_training.feed.settings import FeedSettings
from distributed_training.feed.source import FeedSource
from distributed_training.feed.tls import Certificate, make_certificate
from distributed_training.feed.turns import Turns
from distributed_training.feed.worker_session import WorkerGuest
from distributed_training.runtime.errors import ConfigError, FeedError
from distributed_training.wire import Reason, Role
from distributed_training.wire.fields import Fact
from distributed_training.wire.messages import Goodbye

logger = logging.getLogger(__name__)

_ENDING = 4.0  # seconds that connections have to end


class FeedServer:
    """Listens for loaders. Without a plan it takes that of the first loader.

    Off this machine a token and a certificate are needed; both are made if they are not given. Loaders come as plain
    connections or as WebSockets, at the same port.
    """

    def __init__(
        self,
        plan: Plan | None = None,
        *,
        dataset: str | None = None,
        epochs: int | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        token: bytes | None = None,
        certificate: Certificate | None = None,
        allow: str | Iterable[str] | None = None,
        settings: FeedSettings | None = None,
        service: Turns | None = None,
        facts: Mapping[str, Fact] | None = None,
        behind_proxy: bool = False,
        call: PairingLink | None = None,
    ) -> None:
        """`dataset` is the fingerprint that loaders must have; `epochs` how many will be trained, so that the next one
        can be prepared while one ends; `allow` names the only hosts that may connect. With a `service` the server
        takes clients of that service, and no loaders. `facts` are settings of the plan that loaders must have where
        the plan itself is left to them. `behind_proxy`: a tunnel or proxy on this machine passes on what comes
        from elsewhere, so a token is needed though the host is this machine; TLS is the proxy's unless a certificate
        is given. `call`: do not listen, but dial this loader, which does."""
        self.settings = settings or FeedSettings()
        if call is not None:
            token, certificate = call.token, None
        elif behind_proxy:
            _check_proxied(host, allow)
            token = token or new_token()
        elif not is_loopback(host):
            token, certificate = token or new_token(), certificate or make_certificate()
        self._token, self._certificate = token, certificate
        self._tls = certificate.server_context() if certificate is not None else None
        self._fingerprint = bytes.fromhex(certificate.fingerprint) if certificate is not None else b""
        self.hub = Hub(self.settings, plan, dataset, epochs, facts)
        self.pool = BufferPool(self.settings.memory, pinned=torch.cuda.is_available())
        self.hub.keeping.allocate = self.pool.allocate
        self._door = Door(self.settings, allow, one_address=behind_proxy)
        self.courier = Courier(self.settings.checkpoints_home, self.settings.max_checkpoint, self.settings.deadline)
        self._guests = self._make_guests(service)
        self._sessions: dict[Session, None] = {}  # the oldest first
        self._lock = threading.Lock()
        self._closing = False
        self._caller = self._make_caller(call) if call is not None else None
        self._entrance = self._caller or Accepting(host, port, self._door, self._accepted)
        self.host, self.port = self._entrance.host, self._entrance.port
        self._entrance.start()

    def link(self, host: str | None = None) -> PairingLink:
        """What a loader needs to connect; `host` is the name of this machine as the loader sees it."""
        if self._caller is not None:
            raise ConfigError("this side dials a loader itself: there is no link to it")
        name = host or (self.host if self.host not in ("0.0.0.0", "::", "") else own_address())
        fingerprint = self._certificate.fingerprint if self._certificate is not None else None
        return PairingLink(name, self.port, self._token, fingerprint)

    def source(self) -> FeedSource:
        """The batches, for the training loop."""
        return FeedSource(self.hub)

    def figures(self) -> Figures:
        """What happened so far."""
        return self.hub.figures()._replace(refused=self._door.refused)

    @property
    def skipped(self) -> list[BadSample]:
        """Samples that were left out, where the setting allows that."""
        return list(self.hub.skipped)

    def close(self, *, finished: bool = True) -> None:
        """End all connections. `finished` tells the loaders that the run is over; else they try to connect again."""
        if self._closing:
            return
        self._closing = True
        self.hub.stop(FeedError("the feed was closed"))
        self.courier.close()
        self._entrance.close()
        goodbye = Goodbye(Reason.DONE if finished else Reason.SHUTTING_DOWN, "")
        with self._lock:
            sessions = list(self._sessions)
        for session in sessions:
            session.end(goodbye)
        deadline = time.monotonic() + _ENDING
        for session in sessions:
            session.thread.join(max(0.0, deadline - time.monotonic()))
            if session.thread.is_alive():
                session.abort()
                session.thread.join(1.0)
        self.hub.keeping.close()
        self.pool.close()

    def __enter__(self) -> FeedServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(finished=kind is None)

    def _make_guests(self, service: Turns | None) -> dict[Role, MakeGuest]:
        """What to make of each kind of guest."""
        return _guests(self.hub, self.courier, service)

    # -- connections

    def _accepted(self, sock: socket.socket, host: str) -> None:
        """A connection that somebody has opened to this side."""

        def ended(session: Session) -> None:
            self._door.leave(host, proved=session.proved)

        try:
            session = self._begin(Channel(sock, self._tls, serves=True), self._fingerprint, self._door, ended)
        except OSError as error:
            logger.warning("%s: %s", host, error)
            sock.close()
            self._door.leave(host, proved=False)
            return
        with self._lock:
            unproved = [one for one in self._sessions if not one.proved and not one.aborted]
        if self._door.crowded and unproved and unproved[0] is not session:
            unproved[0].abort()

    def _make_caller(self, link: PairingLink) -> Caller:
        def called(channel: Channel, binding: bytes) -> Session:
            """A connection that this side has opened."""
            return self._begin(channel, binding, caller, caller.ended)

        caller = Caller(link, self._wanted, called, self.hub.stop, ca_file=self.settings.ca_file)
        return caller

    def _begin(
        self, channel: Channel, binding: bytes, door: Door | Caller, on_end: Callable[[Session], None]
    ) -> Session:
        def ended(session: Session) -> None:
            with self._lock:
                self._sessions.pop(session, None)
            on_end(session)

        session = Session(
            channel,
            self.settings,
            self._guests,
            token=self._token,
            fingerprint=binding,
            pool=self.pool,
            door=door,
            on_end=ended,
        )
        with self._lock:
            self._sessions[session] = None
        session.thread.start()
        return session

    def _wanted(self) -> int:
        """How many connections to dial: this rank's part of the loader's workers, which it tells; one to begin with."""
        workers, share = self.hub.told.get("workers"), self.hub.share
        if type(workers) is not int or workers < 1:
            return 1
        workers = min(workers, self.settings.connections)
        return max(1, workers // share.ranks + (share.rank < workers % share.ranks))


def _check_proxied(host: str, allow: object) -> None:
    if not is_loopback(host):
        raise ConfigError(
            f"behind a proxy or tunnel this side listens on this machine only, not at {host}; what comes from "
            "elsewhere comes through the tunnel"
        )
    if allow is not None:
        raise ConfigError(
            "behind a proxy or tunnel all loaders come from this machine: addresses cannot tell them apart (cpu_host, "
            "--allow); the token does, or an access rule of the tunnel"
        )


def _guests(hub: Hub, courier: Courier, service: Turns | None) -> dict[Role, MakeGuest]:
    """A server is there for training or for one service; doctors may always come."""
    doctors = Doctors("training" if service is None else service.mode, lambda: hub.figures().loaders)
    if service is None:
        why = "this server takes batches for training only; to validate or predict, start one with that mode"
        return {
            Role.WORKER: lambda session: WorkerGuest(session, hub, courier),
            Role.CLIENT: lambda session: Unwanted(session, why),
            Role.DOCTOR: doctors.guest,
        }
    no_training = f"this server is there for {service.mode}, not for training; start one with mode='training'"
    return {
        Role.WORKER: lambda session: Unwanted(session, no_training),
        Role.CLIENT: lambda session: ClientGuest(session, service),
        Role.DOCTOR: doctors.guest,
    }
