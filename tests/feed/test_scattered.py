"""Rows that are sent from where they lie arrive as if they had been gathered, however the socket cuts them."""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.feed.channels import carry

from distributed_training.data import ArrayDataset, Plan
from distributed_training.data.base import Share, StoredRows
from distributed_training.data.nested import values_in
from distributed_training.data.sources.split import Subset
from distributed_training.feed.channel import Channel
from distributed_training.feed.course import Course, Part
from distributed_training.feed.pairing import PairingLink
from distributed_training.feed.rows import Rows, gathered, rows_of, settled
from distributed_training.feed.scattered import send_scattered
from distributed_training.feed.settings import LoaderSettings
from distributed_training.feed.worker import Board, Work, Worker
from distributed_training.wire.batches import Sendable
from distributed_training.wire.messages import Lease


def some_rows(rows: int, width: int, chosen: int) -> Rows:
    """Rows of a tensor, in any order, some of them more than once."""
    numbers = np.random.default_rng(width)
    tensor = torch.from_numpy(numbers.integers(0, 256, (rows, width), np.uint8))
    found = rows_of(StoredRows(tensor, numbers.integers(0, rows, chosen)))
    assert found is not None
    return found


def in_one_piece(parts: list[Sendable]) -> bytes:
    return b"".join([gathered(part) for part in parts])  # type: ignore[arg-type]


def send_all(sock: socket.socket, parts: list[Sendable]) -> None:
    sent, size = 0, sum(map(len, parts))
    while sent < size:
        sent += send_scattered(sock.fileno(), parts, sent, 0)[0]


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        one = socket.create_connection(listening.getsockname(), timeout=30)
        other, _ = listening.accept()
    other.settimeout(30)
    with one, other:
        yield one, other


@pytest.mark.parametrize("most", [999, 100_000, 8 << 20])
@pytest.mark.parametrize(("width", "chosen"), [(3, 4000), (2048, 700), (70_000, 90)])
def test_what_arrives_is_what_gathering_gives(
    pair: tuple[socket.socket, socket.socket], width: int, chosen: int, most: int
) -> None:
    """Among views, in more places than one call takes, and to a reader whose pieces end within rows."""
    parts: list[Sendable] = [
        memoryview(b"head"),
        some_rows(50, width, chosen),
        memoryview(b"between"),
        some_rows(7, width + 1, 5),
        memoryview(bytes(61)),
    ]
    expected = in_one_piece(parts)
    sender, receiver = Channel(pair[0]), Channel(pair[1])
    try:
        sender.queue(parts)
        assert carry(sender, receiver, len(expected), most) == expected
        assert not sender.pending
    finally:
        sender.close()
        receiver.close()


def test_bytes_at_the_front_are_left_out_wherever_they_end(pair: tuple[socket.socket, socket.socket]) -> None:
    parts: list[Sendable] = [some_rows(9, 100, 6), memoryview(b"end")]
    whole = in_one_piece(parts)
    for skipped in (0, 1, 99, 100, 101, 599):
        sent, wanted = send_scattered(pair[0].fileno(), parts, skipped, 0)
        assert sent == wanted == len(whole) - skipped
        assert pair[1].recv(wanted, socket.MSG_WAITALL) == whole[skipped:]


def test_a_full_socket_takes_a_part_and_then_blocks(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].setblocking(False)
    parts: list[Sendable] = [some_rows(100, 60_000, 1000)]
    sent, wanted = send_scattered(pair[0].fileno(), parts, 0, 0)
    assert 0 < sent < wanted == 60_000_000
    with pytest.raises(BlockingIOError):
        send_all(pair[0], parts)


def test_errors_are_those_of_sockets(pair: tuple[socket.socket, socket.socket]) -> None:
    """And no signal ends the process."""
    parts: list[Sendable] = [some_rows(100, 60_000, 1000)]
    pair[1].close()
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        send_all(pair[0], parts)
    with pytest.raises(OSError) as caught:
        send_scattered(-1, parts, 0, 0)
    assert caught.value.errno == errno.EBADF


def test_a_signal_in_the_midst_of_a_call_loses_nothing(pair: tuple[socket.socket, socket.socket]) -> None:
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
    got = bytearray()

    def read_late() -> None:
        for _ in range(20):
            os.kill(os.getpid(), signal.SIGUSR1)
            threading.Event().wait(0.01)
        while len(got) < 60_000_000 and (piece := pair[1].recv(1 << 20)):
            got.extend(piece)

    try:
        pair[0].settimeout(None)
        parts: list[Sendable] = [some_rows(100, 60_000, 1000)]
        reading = threading.Thread(target=read_late)
        reading.start()
        send_all(pair[0], parts)
        reading.join(60)
        assert heard
        assert bytes(got) == in_one_piece(parts)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_only_long_rows_stay_where_they_lie() -> None:
    short, long = some_rows(9, 100, 4), some_rows(9, 3000, 4)
    assert settled(long, 3000) is long
    assert bytes(settled(short, 3000)) == bytes(gathered(short))  # type: ignore[arg-type]
    view = memoryview(b"as it is")
    assert settled(view, 1) is view


@pytest.mark.parametrize("kind", ["memory", "memory map", "view of a map", "half of it"])
@pytest.mark.parametrize("shared", [True, False])
def test_rows_in_files_are_read_before_they_are_sent(tmp_path: Path, kind: str, shared: bool) -> None:
    """A disk may take its time, and a socket that waits for it hears nothing. Shared memory is written by who loads."""
    in_memory = np.random.default_rng(0).random((64, 1000), np.float32)
    np.save(tmp_path / "x.npy", in_memory)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    made: dict[str, Any] = {
        "memory": (in_memory, in_memory),
        "memory map": mapped,
        "view of a map": np.asarray(mapped)[:48],
        "half of it": {"x": in_memory, "y": mapped},
    }
    dataset = ArrayDataset(made[kind])
    part = Part(Subset(dataset, np.arange(32)), Plan(32, 8, 0))
    assert part.row == 4000
    assert part.at_hand == (kind == "memory")
    worker = Worker(Work(Course(part), "f", {}, LoaderSettings()), PairingLink("127.0.0.1", 1), Board([0.0] * 20))
    sending: Any = SimpleNamespace(outbox=SimpleNamespace(shared=shared), least=1 if shared else 2048, room=None)
    for block in worker._blocks(Lease(1, 0, 0, 4, 0, 1, 1.0), Share(), sending):
        apart = list(values_in(block.data, StoredRows))
        assert bool(apart) == (shared or kind == "memory")
