"""Plain sockets: sendmsg of a prepared batch, recv_into buffers that are used again. The limit for all others.

One batch sent again and again never leaves the processor's cache. Who sends a dataset has to fetch its rows first:
`sending` takes whatever makes the batches, and "raw sockets, rows of a dataset" gathers them in the order of a shuffle.
"""

from __future__ import annotations

import functools
import socket
import ssl
from collections.abc import Callable, Iterator

import numpy as np

from distributed_training.bench.transport.base import Case, Take, connect, process

NEEDS: list[str] = []
_BUFFERS = 2
Batches = Callable[[Case], Iterator[list[memoryview]]]


def _prepared(case: Case) -> Iterator[list[memoryview]]:
    views = [part.data.cast("B") for part in case.batch()]
    while True:
        yield views


def _gathered(case: Case) -> Iterator[list[memoryview]]:
    """Rows of the whole dataset, gathered into one buffer that is used again."""
    inputs, targets = case.arrays()
    numbers = np.random.default_rng(1)
    rows, labels = np.empty((case.rows, case.width), np.float32), np.empty(case.rows, np.int64)
    views = [rows.data.cast("B"), labels.data.cast("B")]
    while True:
        order = numbers.permutation(case.samples)
        for first in range(0, case.samples, case.rows):
            ids = order[first : first + case.rows]
            np.take(inputs, ids, axis=0, out=rows, mode="clip")
            np.take(targets, ids, out=labels, mode="clip")
            yield views


def _send(listening: socket.socket, case: Case, batches: Batches, tls: ssl.SSLContext | None) -> None:
    sock, _ = listening.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if tls is not None:
        sock = tls.wrap_socket(sock, server_side=True)
    for views in batches(case):
        sent = sock.sendmsg(views) if tls is None else 0  # TLS has no such call
        for view in views:
            if sent < len(view):
                sock.sendall(view[sent:])
            sent = max(0, sent - len(view))


def sending(case: Case, take: Take, batches: Batches, *, tls: bool = False) -> None:
    """Receive into two buffers by turns; their tensors are made once."""
    from distributed_training.feed.tls import client_context, make_certificate

    context = make_certificate().server_context() if tls else None
    size = case.rows * case.width * 4 + case.rows * 8
    buffers = [np.empty(size, np.uint8).data for _ in range(_BUFFERS)]
    tensors = [case.tensors(buffer) for buffer in buffers]
    with socket.create_server(("127.0.0.1", 0)) as listening, process(_send, listening, case, batches, context):
        sock = connect(listening.getsockname()[1])
        sock.settimeout(None)
        sock = client_context().wrap_socket(sock) if tls else sock
        with sock:
            while True:
                for buffer, (inputs, targets) in zip(buffers, tensors):
                    got = sock.recv_into(buffer)
                    while got < size:
                        got += sock.recv_into(buffer[got:])
                    if not take(inputs, targets):
                        return


WAYS = {
    "raw sockets": functools.partial(sending, batches=_prepared),
    "raw sockets, rows of a dataset": functools.partial(sending, batches=_gathered),
    "raw sockets, TLS": functools.partial(sending, batches=_prepared, tls=True),
}
