"""This project over WebSockets: the carrier alone, and a whole feed.

The loader dials and masks what it sends, or the GPU side dials and it does not.
"""

from __future__ import annotations

import functools
import os
import socket
from contextlib import closing
from typing import Any

from distributed_training.bench.transport.base import Case, Take, process

NEEDS = ["distributed_training"]
_PATIENCE = 10.0
_READY = 512 << 10  # bytes


def _take_all(server: Any, take: Take) -> None:
    source = server.source()
    for epoch in range(10**6):
        for _, batch in source.batches(epoch):
            if not take(*batch.data):
                return


def run(case: Case, take: Take, *, gpu_dials: bool) -> None:
    """One loader worker with an array dataset, batches in plan order; without TLS, as the other ways."""
    from distributed_training.data import ArrayDataset, Plan
    from distributed_training.feed import FeedServer, Loader, LoaderSettings, PairingLink
    from distributed_training.feed.answering import HomeDoor

    dataset, plan = ArrayDataset(case.arrays()), Plan(case.samples, case.rows, 0)
    settings, known = LoaderSettings(shared_memory=False), {"dataset": dataset.fingerprint(), "epochs": 10**6}
    if gpu_dials:
        with closing(HomeDoor("127.0.0.1")) as door:
            link = door.link()
            load = Loader(dataset, plan, door, workers=1, settings=settings).run
            with process(load), FeedServer(plan, call=link, **known) as server:
                _take_all(server, take)
        return
    reading, writing = os.pipe()

    def dial() -> None:
        os.close(writing)
        link = PairingLink("127.0.0.1", int(os.read(reading, 100)), carrier="ws")
        Loader(dataset, plan, link, workers=1, settings=settings).run()

    with process(dial), FeedServer(plan, **known) as server:
        os.write(writing, str(server.port).encode())
        _take_all(server, take)


def _send(sock: socket.socket, case: Case, masked: bool) -> None:
    from distributed_training.feed.channel import Channel
    from distributed_training.feed.websocket import WebSocket

    channel, message = Channel(sock), memoryview(case.message())
    channel.wrap(WebSocket(serves=not masked))
    ready = [message] * max(1, _READY // len(message))  # as a feed does it: what is ready goes together
    while True:
        channel.queue(ready)
        while channel.pending:
            if not channel.flush():
                channel.wait(_PATIENCE)


def carry(case: Case, take: Take, *, masked: bool) -> None:
    """The carrier alone, with one prepared batch again and again: just what the libraries beside it do."""
    from distributed_training.feed.channel import Channel
    from distributed_training.feed.websocket import WebSocket

    size = len(case.message())
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ours = socket.create_connection(listening.getsockname())
        theirs, _ = listening.accept()
        with process(_send, theirs, case, masked):
            channel = Channel(ours)
            channel.wrap(WebSocket(serves=masked))
            more = True
            while more:
                memory = bytearray(size)
                rest = memoryview(memory)
                while rest:
                    got = channel.receive_into(rest)
                    if got is None:
                        channel.wait(_PATIENCE)
                    else:
                        rest = rest[got:]
                more = take(*case.tensors(memory))
            channel.close()


WAYS = {
    "our carrier, client sends": functools.partial(carry, masked=True),
    "our carrier": functools.partial(carry, masked=False),
    "ours, WebSocket": functools.partial(run, gpu_dials=False),
    "ours, WebSocket, GPU side dials": functools.partial(run, gpu_dials=True),
}
