"""The GPU side of a feed: listens, lets in who belongs to the run, and gives the training loop a batch source."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from types import TracebackType

import torch

from distributed_training.data.plan import Plan
from distributed_training.feed.arrivals import BadSample
from distributed_training.feed.buffers import BufferPool
from distributed_training.feed.channel import Channel, close_in_children
from distributed_training.feed.client_session import ClientGuest
from distributed_training.feed.doctor.session import Doctors
from distributed_training.feed.door import Door
from distributed_training.feed.figures import Figures
from distributed_training.feed.guests import MakeGuest, Unwanted
from distributed_training.feed.hub import Hub
from distributed_training.feed.pairing import PairingLink, is_loopback, new_token, plain_address
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

    Off this machine a token and a certificate are needed; both are made if they are not given.
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
    ) -> None:
        """`dataset` is the fingerprint that loaders must have; `epochs` how many will be trained, so that the next one
        can be prepared while one ends; `allow` names the only hosts that may connect. With a `service` the server
        takes clients of that service, and no loaders. `facts` are settings of the plan that loaders must have where
        the plan itself is left to them."""
        self.settings = settings or FeedSettings()
        if not is_loopback(host):
            token, certificate = token or new_token(), certificate or make_certificate()
        self._token, self._certificate = token, certificate
        self._tls = certificate.server_context() if certificate is not None else None
        self._fingerprint = bytes.fromhex(certificate.fingerprint) if certificate is not None else b""
        self.hub = Hub(self.settings, plan, dataset, epochs, facts)
        self.pool = BufferPool(self.settings.memory, pinned=torch.cuda.is_available())
        self._door = Door(self.settings, allow)
        self._guests = self._make_guests(service)
        self._sessions: dict[Session, None] = {}  # the oldest first
        self._lock = threading.Lock()
        self._closing = False
        self._listening = _listen(host, port)
        self.host, self.port = host, int(self._listening.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, name=f"feed door {self.port}", daemon=True)
        self._thread.start()

    def link(self, host: str | None = None) -> PairingLink:
        """What a loader needs to connect; `host` is the name of this machine as the loader sees it."""
        name = host or (self.host if self.host not in ("0.0.0.0", "::", "") else _own_address())
        fingerprint = self._certificate.fingerprint if self._certificate is not None else None
        return PairingLink(name, self.port, self._token, fingerprint)

    def source(self) -> FeedSource:
        """The batches, for the training loop."""
        return FeedSource(self.hub)

    def figures(self) -> Figures:
        """What happened so far."""
        return replace(self.hub.figures(), refused=self._door.refused)

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
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # ends an accept; to close alone does not
        self._thread.join(_ENDING)
        self._listening.close()
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
        self.pool.close()

    def __enter__(self) -> FeedServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(finished=kind is None)

    def _make_guests(self, service: Turns | None) -> dict[Role, MakeGuest]:
        """What to make of each kind of guest."""
        return _guests(self.hub, service)

    # -- the door

    def _accept(self) -> None:
        while not self._closing:
            try:
                sock, address = self._listening.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if self._closing:
                    return
                logger.warning("a connection could not be accepted: %s", error)  # too many open files, for one
                time.sleep(0.1)
                continue
            host = plain_address(str(address[0]))
            if refusal := self._door.enter(host):
                sock.close()
                self._door.refuse(f"{host}:{address[1]}", refusal)
                continue
            self._begin(sock, host)

    def _begin(self, sock: socket.socket, host: str) -> None:
        try:
            session = Session(
                Channel(sock, self._tls, serves=True),
                self.settings,
                self._guests,
                token=self._token,
                fingerprint=self._fingerprint,
                pool=self.pool,
                door=self._door,
                on_end=lambda ended: self._ended(ended, host),
            )
        except OSError as error:
            logger.warning("%s: %s", host, error)
            sock.close()
            self._door.leave(host, proved=False)
            return
        with self._lock:
            self._sessions[session] = None
            unproved = [one for one in self._sessions if not one.proved and not one.aborted]
        session.thread.start()
        if self._door.crowded and unproved[0] is not session:
            unproved[0].abort()

    def _ended(self, session: Session, host: str) -> None:
        with self._lock:
            self._sessions.pop(session, None)
        self._door.leave(host, proved=session.proved)


def _guests(hub: Hub, service: Turns | None) -> dict[Role, MakeGuest]:
    """A server is there for training or for one service; doctors may always come."""
    doctors = Doctors("training" if service is None else service.mode, lambda: hub.figures().loaders)
    if service is None:
        why = "this server takes batches for training only; to validate or predict, start one with that mode"
        return {
            Role.WORKER: lambda session: WorkerGuest(session, hub),
            Role.CLIENT: lambda session: Unwanted(session, why),
            Role.DOCTOR: doctors.guest,
        }
    no_training = f"this server is there for {service.mode}, not for training; start one with mode='training'"
    return {
        Role.WORKER: lambda session: Unwanted(session, no_training),
        Role.CLIENT: lambda session: ClientGuest(session, service),
        Role.DOCTOR: doctors.guest,
    }


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(128)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen at {host}:{port}: {error.strerror}; choose another port or address") from None
    sock.settimeout(1.0)
    return close_in_children(sock)


def _own_address() -> str:
    """The address that this machine uses towards others; nothing is sent to find it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()
