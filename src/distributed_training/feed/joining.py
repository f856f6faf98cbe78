"""The way in of a worker or client: dial, prove the token, say what it has, be welcome or hear why not."""

from __future__ import annotations

import logging
import os
import platform
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distributed_training._version import __version__
from distributed_training.data.plan import PLAN_VERSION
from distributed_training.feed.channel import Channel
from distributed_training.feed.compression import CODECS
from distributed_training.feed.dialling import open_link
from distributed_training.feed.http_upgrade import LostError, RefusedError
from distributed_training.feed.pairing import PairingLink
from distributed_training.feed.settings import LoaderSettings
from distributed_training.feed.shared import host_id
from distributed_training.runtime.errors import FeedError
from distributed_training.wire import Connection, Lost, PeerError, Reason, Rejected, Role
from distributed_training.wire.limits import DEFAULT_MAX_PAYLOAD
from distributed_training.wire.messages import Error, Join, Refused, Welcome

if TYPE_CHECKING:
    from distributed_training.wire.events import Event
    from distributed_training.wire.fields import Fact

logger = logging.getLogger(__name__)

_CONNECT = 10.0  # seconds for one attempt, handshake included
_SAY = 5.0  # seconds of vain attempts after which a person should know
_FINAL = {
    Reason.DATASET, Reason.PLAN, Reason.CONFIG, Reason.ROLE, Reason.VERSION, Reason.ADDRESS,
    Reason.TOKEN_NEEDED, Reason.TOKEN_UNEXPECTED, Reason.TOKEN_WRONG,
}  # fmt: skip
"""Reasons for a refusal that another attempt would not change."""
_REJECTIONS = {
    Reason.TOKEN_NEEDED: "it needs a token; use the whole pairing link that it prints",
    Reason.TOKEN_UNEXPECTED: "it has no token, this link is for another run",
    Reason.TOKEN_WRONG: "the token is not that of this run; take the pairing link that it prints now",
    Reason.VERSION: "it speaks another version of the protocol; install the same release on both sides",
}
_MOVED = ". If its tunnel is back under another address it has printed a new link: start this again with that one"

_KINDS = {Role.WORKER: "loader", Role.CLIENT: "client"}


@dataclass
class Joined:
    """A connection on which this worker or client is welcome."""

    channel: Channel
    connection: Connection
    facts: dict[str, Any] = field(default_factory=dict)
    """What the GPU side told along with its welcome."""
    early: list[Event] = field(default_factory=list)
    """What came right after it."""


def join_patiently(
    link: PairingLink, facts: dict[str, Fact], dataset: str, settings: LoaderSettings, role: Role = Role.WORKER
) -> Joined:
    """As `join_server`, tried again for as long as the settings say. FeedError where that is over."""
    pause, since, said = settings.first_pause, time.monotonic(), False
    while True:
        try:
            return join_server(link, facts, dataset, settings, role)
        except LostError as error:
            waited = time.monotonic() - since
            if waited > settings.patience:
                raise FeedError(f"gave up after {waited:.0f} s: {error}; is the GPU side running?") from None
            if waited > _SAY and not said:
                said = True
                moved = _MOVED if link.carrier == "ws" else ""
                logger.warning("%s; trying again for %.0f s%s", error, settings.patience, moved)
            time.sleep(pause * random.uniform(0.5, 1.0))  # many workers must not come all at once
            pause = min(2 * pause, settings.longest_pause)


def join_server(
    link: PairingLink, facts: dict[str, Fact], dataset: str, settings: LoaderSettings, role: Role = Role.WORKER
) -> Joined:
    """Connect. RefusedError where that makes no sense to try again, LostError where it does."""
    deadline = time.monotonic() + _CONNECT
    channel, binding = open_link(link, _CONNECT, ca_file=settings.ca_file)
    connection = guest_connection(role, link.token, binding, settings)
    joined = Joined(channel, connection)
    try:
        prove(joined, link, deadline)
        say_join(joined, link, join_message(facts, dataset, settings), deadline)
        return joined
    except (OSError, PeerError) as error:
        channel.close()
        raise LostError(f"{link.address}: {error}{_hint(link)}") from None
    except BaseException:
        channel.close()
        raise


def guest_connection(role: Role, token: bytes | None, binding: bytes, settings: LoaderSettings) -> Connection:
    """The guest's side of a conversation that begins."""
    locate = (lambda *_: None) if settings.shared_memory else None  # nothing is ever sent to us that way
    return Connection(role, token=token, binding=binding, locate=locate)


def join_message(facts: dict[str, Fact], dataset: str, settings: LoaderSettings) -> Join:
    """What a guest says of itself."""
    name = f"{platform.node()}/{os.getpid()}"
    codecs = tuple(CODECS) if settings.compression != "off" else ()
    host = host_id() if settings.shared_memory else ""
    return Join(name, __version__, dataset, PLAN_VERSION, facts, codecs, host, DEFAULT_MAX_PAYLOAD)


def prove(joined: Joined, link: PairingLink, deadline: float) -> None:
    """Prove the token to each other, by this time."""
    while not joined.connection.authenticated:
        _turn(joined, link, deadline)


def say_join(joined: Joined, link: PairingLink, join: Join, deadline: float) -> None:
    """Say what this side has, and be welcome, by this time."""
    joined.connection.send(join)
    while not joined.connection.is_open:
        _turn(joined, link, deadline)


def _turn(joined: Joined, link: PairingLink, deadline: float) -> None:
    """Send what is due and hear what came, or wait for it."""
    channel, connection = joined.channel, joined.connection
    channel.queue(connection.data_to_send())
    channel.flush()
    size = channel.receive_into(connection.get_buffer())
    if size is None:
        channel.wait(deadline - time.monotonic())
        if time.monotonic() > deadline:
            raise LostError(f"{link.address} does not answer as this protocol wants it")
        return
    if size == 0:
        connection.receive_eof()
    else:
        connection.buffer_updated(size)
    for event in connection.events():
        _hear(joined, link, event)
    if connection.closed:
        raise LostError(f"{link.address} ended the connection")


def _hear(joined: Joined, link: PairingLink, event: Event) -> None:
    if isinstance(event, Rejected):
        text = _REJECTIONS.get(event.reason, event.reason.name.lower().replace("_", " "))
        raise _kind(event.reason)(f"{link.address} refused the connection: {text}")
    if isinstance(event, Refused):
        kind = _KINDS[joined.connection.role]
        raise _kind(event.reason)(f"{link.address} does not take this {kind}: {event.text}")
    if isinstance(event, Lost):
        raise LostError(f"{link.address} ended the connection during the handshake{_hint(link)}")
    if isinstance(event, Error):
        raise LostError(f"{link.address} reports: {event.text}")
    if isinstance(event, Welcome):
        joined.facts = dict(event.facts)
    elif joined.connection.is_open:
        joined.early.append(event)


def _hint(link: PairingLink) -> str:
    """A server that listens for other machines speaks TLS only, and cannot say so to a peer that does not."""
    return "" if link.encrypted else "; if other machines may connect to it, take the whole pairing link that it prints"


def _kind(reason: Reason) -> type[FeedError]:
    return RefusedError if reason in _FINAL else LostError
