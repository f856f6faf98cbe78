"""Plain sockets: sendmsg of a prepared batch, recv_into buffers that are used again. The limit for all others."""

from __future__ import annotations

import socket

import numpy as np
from benchmarks.feed_peers.base import Case, Take, connect, process

NEEDS: list[str] = []
_BUFFERS = 2


def _send(listening: socket.socket, case: Case) -> None:
    sock, _ = listening.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    views = [memoryview(part).cast("B") for part in case.batch()]
    size = sum(map(len, views))
    while True:
        sent = sock.sendmsg(views)
        if sent < size:
            for view in views:
                if sent < len(view):
                    sock.sendall(view[sent:])
                sent = max(0, sent - len(view))


def run(case: Case, take: Take) -> None:
    """Receive into two buffers by turns; their tensors are made once."""
    size = case.rows * case.width * 4 + case.rows * 8
    buffers = [memoryview(np.empty(size, np.uint8)) for _ in range(_BUFFERS)]
    tensors = [case.tensors(buffer) for buffer in buffers]
    with socket.create_server(("127.0.0.1", 0)) as listening, process(_send, listening, case):
        sock = connect(listening.getsockname()[1])
        sock.settimeout(None)
        with sock:
            while True:
                for buffer, (inputs, targets) in zip(buffers, tensors):
                    got = sock.recv_into(buffer)
                    while got < size:
                        got += sock.recv_into(buffer[got:])
                    if not take(inputs, targets):
                        return


WAYS = {"raw sockets": run}
