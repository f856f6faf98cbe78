"""Bytes through a channel, plain and encrypted: all of them, in order, however they are cut on the way."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from tests.feed.channels import carry

from distributed_training.feed.channel import Channel
from distributed_training.feed.tls import client_context, make_certificate

Ends = tuple[Channel, Channel]


@pytest.fixture(params=["plain", "tls"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    """Two channels that are connected."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        dialled = socket.create_connection(listening.getsockname())
        accepted, _ = listening.accept()
    if request.param == "plain":
        one, other = Channel(dialled), Channel(accepted)
    else:
        one = Channel(dialled, client_context())
        other = Channel(accepted, make_certificate().server_context(), serves=True)
        shaking = threading.Thread(target=other.shake_hands, args=(time.monotonic() + 30,))
        shaking.start()
        one.shake_hands(time.monotonic() + 30)
        shaking.join(30)
    yield one, other
    one.close()
    other.close()


@pytest.mark.parametrize("most", [1000, 100_000, 8 << 20])
def test_large_and_small_views_arrive_in_order(ends: Ends, most: int) -> None:
    numbers = random.Random(most)
    sizes = [numbers.choice([1, 5, 64, 3000, 16 << 10, 300_000, 6 << 20]) for _ in range(12)]
    data = numbers.randbytes(sum(sizes))
    views, at = [], 0
    for size in sizes:
        views.append(memoryview(data)[at : at + size])
        at += size
    ends[0].queue(views)
    assert carry(*ends, len(data), most) == data
    assert not ends[0].pending


def test_what_was_sent_before_a_connection_broke_is_still_heard(ends: Ends) -> None:
    one, other = ends
    one.queue([memoryview(b"why it ends")])
    one.flush()
    one._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    one.close()  # by a reset
    buffer, heard, deadline = memoryview(bytearray(1 << 16)), b"", time.monotonic() + 30
    while not heard:
        assert time.monotonic() < deadline
        size = other.receive_into(buffer)
        heard = bytes(buffer[: size or 0])
    assert heard == b"why it ends"
    with suppress(OSError):
        while other.receive_into(buffer) != 0:  # the end of the stream is as good as an error
            assert time.monotonic() < deadline
