"""Peers that mean no good: each does its worst on one connection and returns when that has ended."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
from tests.feed.datasets import make_dataset, make_plan

from distributed_training.data.plan import PLAN_VERSION
from distributed_training.feed import FeedServer
from distributed_training.feed.course import Course, Part
from distributed_training.feed.pairing import new_token
from distributed_training.wire import Connection, PeerError, Reason, Role, pack_batch
from distributed_training.wire.frames import Kind, pack_head
from distributed_training.wire.messages import Error, Join, Lease, Request

PATIENCE = 10.0


@contextmanager
def connected(server: FeedServer) -> Iterator[socket.socket]:
    """A socket to the server; left when the server has ended the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as sock, suppress(ConnectionError):
        yield sock
        while sock.recv(65536):
            pass


def carry(sock: socket.socket, connection: Connection, until: Callable[[], bool]) -> bytes:
    """Be the carrier of a connection until something is so; all that was sent."""
    sent = b""
    end = time.monotonic() + PATIENCE
    while not until():
        data = b"".join(connection.data_to_send())
        sock.sendall(data)
        sent += data
        if until():
            break
        assert time.monotonic() < end
        received = sock.recv(65536)
        if not received:
            raise ConnectionResetError("the server ended the connection")
        connection.receive_data(received)
    return sent


def guest(server: FeedServer, token: bytes | None = None) -> Connection:
    return Connection(Role.WORKER, token=token or server.link().token)


@contextmanager
def admitted(server: FeedServer, name: str = "a traitor") -> Iterator[tuple[socket.socket, Connection]]:
    """A worker that knows the token and has the right data."""
    dataset = make_dataset("arrays")
    facts = Course(Part(dataset, make_plan(dataset))).all_facts()
    join = Join(name, "0", dataset.fingerprint(), PLAN_VERSION, facts, (), "", 1 << 20)
    connection = guest(server)
    with connected(server) as sock:
        carry(sock, connection, lambda: connection.authenticated)
        connection.send(join)
        carry(sock, connection, lambda: connection.is_open)
        yield sock, connection


# -- before the token is proved


def replays_a_handshake(server: FeedServer) -> None:
    """Says again what an honest worker said."""
    connection = guest(server)
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as sock:
        recorded = carry(sock, connection, lambda: connection.authenticated)
    hello = len(recorded) - len(pack_head(Kind.PROOF, bytes(32)))
    with connected(server) as sock:
        sock.sendall(recorded[:hello])
        assert sock.recv(65536)  # another challenge than the recorded proof answers
        sock.sendall(recorded[hello:])


def has_another_token(server: FeedServer) -> None:
    connection = guest(server, new_token())
    with connected(server) as sock, suppress(PeerError):
        carry(sock, connection, lambda: connection.closed)


def has_no_token(server: FeedServer) -> None:
    connection = Connection(Role.WORKER, token=None)
    with connected(server) as sock, suppress(PeerError):
        carry(sock, connection, lambda: connection.closed)


def says_garbage(server: FeedServer) -> None:
    with connected(server) as sock:
        sock.sendall(os.urandom(5000))


def claims_a_huge_greeting(server: FeedServer) -> None:
    with connected(server) as sock:
        head = bytearray(pack_head(Kind.HELLO, bytes(36))[:40])
        head[32:36] = (2**31).to_bytes(4, "little")
        sock.sendall(head)


def sends_a_batch_first(server: FeedServer) -> None:
    with connected(server) as sock:
        sock.sendall(pack_head(Kind.BATCHES, bytes(100), payload=2**40))


def sends_byte_by_byte(server: FeedServer) -> None:
    with connected(server) as sock:
        for byte in pack_head(Kind.HELLO, bytes(36)):
            sock.sendall(bytes([byte]))
            time.sleep(0.05)


def says_nothing(server: FeedServer) -> None:
    with connected(server):
        pass


# -- with the token: a worker that is broken, or has been taken over


def damages_a_frame(server: FeedServer) -> None:
    with admitted(server) as (sock, connection):
        connection.send(Request(1))
        frame = bytearray(b"".join(connection.data_to_send()))
        frame[-1] ^= 1
        sock.sendall(frame)


def sends_nonsense(server: FeedServer) -> None:
    with admitted(server) as (sock, _):
        sock.sendall(pack_head(Kind.REQUEST, b"\xc1" * 10))


def sends_long_metadata(server: FeedServer) -> None:
    with admitted(server) as (sock, _):
        sock.sendall(pack_head(Kind.REQUEST, b"")[:32] + (2**31).to_bytes(4, "little") + bytes(4))


def sends_more_than_its_credit(server: FeedServer) -> None:
    with admitted(server) as (sock, _):
        sock.sendall(pack_head(Kind.BATCHES, bytes(10), payload=server.settings.memory))


def sends_more_than_there_is(server: FeedServer) -> None:
    with admitted(server) as (sock, _):
        sock.sendall(pack_head(Kind.BATCHES, bytes(10), payload=2**60))


def speaks_as_the_server(server: FeedServer) -> None:
    with admitted(server) as (sock, _):
        sock.sendall(pack_head(Kind.LEASE, b"\x90"))


def forges_lines_of_the_log(server: FeedServer) -> None:
    with admitted(server, "a traitor\nWARNING all is lost\x1b[2J") as (sock, connection):
        connection.send(Error(Reason.INTERNAL, "really\nWARNING all is lost"))
        sock.sendall(b"".join(connection.data_to_send()))


def brings_what_nobody_asked_for(server: FeedServer) -> None:
    with admitted(server) as (sock, connection):
        connection.send(Request(1))
        carry(sock, connection, lambda: connection.sending.available > 0)
        connection.send_batches(1, [pack_batch(0, 10**9, np.arange(2), np.zeros((2, 3), np.float32))])
        sock.sendall(b"".join(connection.data_to_send()))


def brings_other_samples(server: FeedServer) -> None:
    """A batch of the step it was asked for, but of samples that the plan does not have there."""
    with admitted(server) as (sock, connection):
        connection.send(Request(1))
        leases: list[Lease] = []

        def lent() -> bool:
            leases.extend(event for event in connection.events() if isinstance(event, Lease))
            return bool(leases) and connection.sending.available > 0

        carry(sock, connection, lent)
        batch = pack_batch(leases[0].epoch, leases[0].first, np.arange(2), np.zeros((2, 20), np.float32))
        connection.send_batches(leases[0].lease, [batch])
        sock.sendall(b"".join(connection.data_to_send()))
