"""Bytes on the wire."""

from __future__ import annotations

import socket

from distributed_training.bench import traffic


def test_bytes_are_those_that_a_connection_sent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as out:
        into, _ = server.accept()
        with into:
            out.sendall(b"x" * 5000)
            received = 0
            while received < 5000:
                received += len(into.recv(65536))
            before = traffic.sent_bytes()
            out.sendall(b"y" * 100_000)
            received = 0
            while received < 100_000:
                received += len(into.recv(65536))
            into.sendall(b"z")  # carries the last acknowledgement
            out.recv(1)
            sent = traffic.difference(before, traffic.sent_bytes())
    assert 100_000 <= sent <= 100_001
