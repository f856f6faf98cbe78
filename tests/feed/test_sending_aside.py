"""What a thread of the C library sends arrives whole and in order; what cannot arrive is said; no wait is for ever."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tests.feed.channels import carry, read

from distributed_training.data.base import StoredRows
from distributed_training.feed import sending_aside
from distributed_training.feed.channel import Channel
from distributed_training.feed.rows import gathered, rows_of
from distributed_training.feed.tls import client_context

Ends = tuple[Channel, Channel]
SIZES = [1, 5, 64, 3000, 64 << 10, 300_000, 6 << 20]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """A channel that may send aside, and its peer."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        one = Channel(socket.create_connection(listening.getsockname()))
        accepted, _ = listening.accept()
    other = Channel(accepted)
    assert one.allow_aside()
    yield one, other
    one.close()
    other.close()


def until_gone(channel: Channel, seconds: float = 30.0) -> int:
    """Look until all that went aside has gone; how many bytes that was."""
    total, end = 0, time.monotonic() + seconds
    while channel.goes_aside:
        assert time.monotonic() < end
        channel.wait_aside(1.0)
        total += channel.flush(aside=True)
    return total


def some(numbers: random.Random, count: int) -> list[bytes]:
    return [numbers.randbytes(numbers.choice(SIZES)) for _ in range(count)]


@pytest.mark.parametrize("seed", range(4))
def test_here_and_aside_by_turns_all_arrives_in_order(ends: Ends, seed: int) -> None:
    numbers, (sender, receiver) = random.Random(seed), ends
    parts = some(numbers, 20)
    got = bytearray()
    whole = b"".join(parts)
    reading = threading.Thread(target=lambda: got.extend(read(receiver, len(whole), 1 << 20)))
    reading.start()
    gone = 0
    for part in parts:
        sender.queue([memoryview(part)])
        gone += sender.flush(aside=numbers.random() < 0.6)
    while sender.pending:
        sender.wait_aside(0.1)
        gone += sender.flush(aside=numbers.random() < 0.3)
    reading.join(30)
    assert gone == len(whole)
    assert bytes(got) == whole


def test_the_caller_goes_on_while_a_peer_does_not_read(ends: Ends) -> None:
    sender, receiver = ends
    data = random.Random(0).randbytes(32 << 20)  # more than sockets hold
    sender.queue([memoryview(data)])
    start = time.monotonic()
    assert sender.flush(aside=True) == 0
    assert sender.goes_aside
    assert sender.pending
    assert sender.full
    assert sender.bytes_aside == len(data)
    assert sender.wait_aside(0.05)
    assert time.monotonic() - start < 10
    sender.flush(aside=True)
    assert sender.behind, "the connection takes less than there is"
    sender.queue([memoryview(b"after it")])
    sender.flush()  # nothing may come before what is on its way
    assert carry(sender, receiver, len(data) + 8, 1 << 20) == data + b"after it"
    until_gone(sender)
    assert sender.bytes_aside == 0
    assert not sender.pending
    assert not sender.wait_aside(1.0), "there is nothing to wait for"


def test_what_lies_in_many_places_is_sent_from_there(ends: Ends) -> None:
    sender, receiver = ends
    numbers = np.random.default_rng(0)
    for width in (100, 100_000):
        tensor = torch.from_numpy(numbers.integers(0, 256, (20, width), np.uint8))
        rows = rows_of(StoredRows(tensor, numbers.integers(0, 20, 50)))
        assert rows is not None
        sender.queue([memoryview(b"rows:"), rows, memoryview(b"")])
        sender.flush(aside=True)
        assert carry(sender, receiver, 5 + len(rows), 1 << 16) == b"rows:" + bytes(gathered(rows))
        until_gone(sender)


def test_a_part_that_was_begun_here_is_finished_aside(ends: Ends) -> None:
    sender, receiver = ends
    data = random.Random(1).randbytes(32 << 20)
    sender.queue([memoryview(data)])
    begun = sender.flush()
    assert 0 < begun < len(data)
    sender.flush(aside=True)
    assert carry(sender, receiver, len(data), 1 << 20) == data
    until_gone(sender)
    assert not sender.pending


def test_a_connection_that_breaks_is_an_error_and_stays_one(ends: Ends) -> None:
    sender, receiver = ends
    sender.queue([memoryview(bytes(32 << 20))])
    sender.flush(aside=True)
    receiver.close()
    with pytest.raises(OSError, match=r"reset|pipe"):
        until_gone(sender)
    for aside in (True, False):
        with pytest.raises(OSError, match=r"reset|pipe"):
            sender.flush(aside=aside)


def test_a_channel_that_is_closed_lets_go_of_what_nobody_reads(ends: Ends) -> None:
    sender, receiver = ends
    data = memoryview(bytearray(32 << 20))
    sender.queue([data])
    sender.flush(aside=True)
    number = sender._socket.fileno()
    start = time.monotonic()
    sender.close()
    assert time.monotonic() - start < 10
    assert sender._socket.fileno() == -1 != number
    assert not sending_aside._STUCK
    sender.queue([data[:10]])
    with pytest.raises(OSError, match="descriptor"):
        sender.flush(aside=True)
    sender.close()
    buffer = memoryview(bytearray(1 << 20))
    end = time.monotonic() + 30
    while (size := receiver.receive_into(buffer)) != 0:  # the peer sees the end
        assert time.monotonic() < end
        if size is None:
            receiver.wait(0.05)


def test_what_cannot_be_sent_aside_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = socket.socketpair()
    with other:
        encrypted = Channel(one, client_context())
        assert not encrypted.allow_aside()
        encrypted.close()
    one, other = socket.socketpair()
    with other:
        monkeypatch.setattr(sending_aside, "_library", lambda: None)
        plain = Channel(one)
        assert not plain.allow_aside()
        plain.queue([memoryview(b"as ever")])
        assert plain.flush(aside=True) == 7
        assert other.recv(100) == b"as ever"
        plain.close()
