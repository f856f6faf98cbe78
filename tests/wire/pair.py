"""Two sides of a connection, and the bytes between them carried by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from distributed_training.wire import Connection, Event, Role
from distributed_training.wire.messages import Join, Welcome

TOKEN = b"a token of thirty-two bytes, yes!"
SERVER_NONCE, PEER_NONCE = b"s" * 32, b"p" * 32
CREDIT = 1 << 30


def join(**changes: Any) -> Join:
    """What a worker says of itself."""
    given: dict[str, Any] = {
        "name": "host:1",
        "software": "0.1",
        "dataset": "d1",
        "plan": 1,
        "facts": {"seed": 0, "batch_size": 64},
        "codecs": (1, 2),
        "host": "",
        "max_payload": 1 << 30,
    }
    return Join(**{**given, **changes})


def welcome(**changes: Any) -> Welcome:
    """What the server answers."""
    given: dict[str, Any] = {
        "session": "s1",
        "software": "0.1",
        "facts": {},
        "codecs": (1,),
        "shared": False,
        "max_payload": 1 << 30,
    }
    return Welcome(**{**given, **changes})


def sent(connection: Connection) -> bytes:
    """What a side has to send, as one string of bytes."""
    parts = connection.data_to_send()
    return b"".join([view for part in parts for view in ([part] if isinstance(part, memoryview) else part.pieces())])


def carry(one: Connection, other: Connection) -> tuple[list[Event], list[Event]]:
    """Carry bytes both ways until there are none left; the events of each side."""
    while True:
        there, back = sent(one), sent(other)
        if not there and not back:
            return list(one.events()), list(other.events())
        if there:
            other.receive_data(there)
        if back:
            one.receive_data(back)


def greeted(role: Role = Role.WORKER, token: bytes | None = TOKEN, **settings: Any) -> tuple[Connection, Connection]:
    """(server, peer) that have proved the token to each other."""
    server = Connection(Role.SERVER, token=token, nonce=SERVER_NONCE, **settings)
    peer = Connection(role, token=token, nonce=PEER_NONCE, **settings)
    carry(server, peer)
    return server, peer


def opened(
    role: Role = Role.WORKER, credit: int = CREDIT, shared: bool = False, **settings: Any
) -> tuple[Connection, Connection]:
    """(server, peer) after the handshake, with credit both ways."""
    server, peer = greeted(role, **settings)
    most = settings.get("max_payload", 1 << 30)
    peer.send(join(max_payload=most))
    carry(server, peer)
    server.send(welcome(shared=shared, max_payload=most))
    carry(server, peer)
    if credit:
        server.send_credit(credit)
        peer.send_credit(credit)
        carry(server, peer)
    return server, peer


def equal(one: Any, other: Any) -> bool:
    """Whether two nested batches are the same in type, shape and every bit."""
    if isinstance(one, (np.ndarray, np.generic)):
        same = type(one) is type(other) and one.dtype == other.dtype and one.shape == other.shape
        return bool(same and one.tobytes() == other.tobytes())
    if type(one) is float:
        return type(other) is float and (one == other or (one != one and other != other))
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)
