"""Batches in frames: coalesced, described once, aligned, received into the caller's memory without a copy."""

from __future__ import annotations

import zlib
from typing import Any

import msgpack
import numpy as np
import pytest
from tests.wire.pair import carry, equal, opened, sent

from distributed_training.wire import (
    Batch,
    Connection,
    MisuseError,
    PackedBatch,
    PeerError,
    Reason,
    Result,
    Role,
    pack_batch,
)
from distributed_training.wire.frames import HEADER_SIZE, Flag, Kind, pack_head
from distributed_training.wire.limits import MAX_BATCHES, MAX_LAYOUTS

SMALL = (np.arange(640, dtype=np.float32).reshape(64, 10), np.arange(64))


def packed(step: int = 0, data: Any = SMALL, **more: Any) -> PackedBatch:
    return pack_batch(2, step, np.arange(64) + step, data, **more)


def arrived(server: Connection, worker: Connection) -> list[Batch]:
    events, _ = carry(server, worker)
    assert all(isinstance(event, Batch) for event in events)
    return events  # type: ignore[return-value]


def test_several_batches_travel_in_one_frame() -> None:
    server, worker = opened()
    worker.send_batches(7, [packed(step, rank=1, ranks=2, seconds=0.5) for step in range(5)])
    assert len(worker.data_to_send()) == 1 + 5 * 3
    worker.send_batches(7, [packed(step, rank=1, ranks=2, seconds=0.5) for step in range(5)])
    worker.data_to_send()

    server, worker = opened()
    worker.send_batches(7, [packed(step, rank=1, ranks=2, seconds=0.5) for step in range(5)])
    batches = arrived(server, worker)
    assert [(b.stream, b.epoch, b.step, b.rank, b.ranks, b.seconds) for b in batches] == [
        (7, 2, step, 1, 2, 0.5) for step in range(5)
    ]
    for batch in batches:
        assert batch.ids.tolist() == (np.arange(64) + batch.step).tolist()
        assert equal(batch.data(), SMALL)
    assert len({id(batch.memory) for batch in batches}) == 1


def test_the_tree_is_sent_once() -> None:
    _, worker = opened()
    sizes = []
    for step in range(3):
        worker.send_batches(1, [packed(step)])
        sizes.append(len(worker.data_to_send()[0]))
        assert sizes[step] <= sizes[0]
    assert sizes[1] == sizes[2] < sizes[0]


def test_more_layouts_than_are_remembered() -> None:
    server, worker = opened()
    for round_ in range(2):
        for number in range(MAX_LAYOUTS + 9):
            worker.send_batches(1, [packed(number, {f"key {number}": np.ones(round_ + 1)})])
        for number, batch in enumerate(arrived(server, worker)):
            assert equal(batch.data(), {f"key {number}": np.ones(round_ + 1)})


def test_more_layouts_than_are_remembered_in_one_frame() -> None:
    server, worker = opened()
    worker.send_batches(1, [packed(n, {f"key {n % 90}": n}) for n in range(200)])
    assert [batch.data() for batch in arrived(server, worker)] == [{f"key {n % 90}": n} for n in range(200)]


def test_shapes_may_change_without_a_new_layout() -> None:
    server, worker = opened()
    for length in (5, 0, 9):
        worker.send_batches(1, [packed(length, [np.ones((2, length), np.int32)])])
    assert [batch.data()[0].shape for batch in arrived(server, worker)] == [(2, 5), (2, 0), (2, 9)]


def test_payloads_are_not_copied() -> None:
    data = np.arange(100_000, dtype=np.float32)
    given: list[bytearray] = []

    def allocate(size: int, kind: Kind, stream: int) -> bytearray:
        assert (kind, stream) == (Kind.BATCHES, 9)
        given.append(bytearray(size + 100))
        return given[-1]

    server, worker = opened(allocate=allocate)
    worker.send_batches(9, [packed(0, data)])
    views = worker.data_to_send()
    assert any(np.shares_memory(np.frombuffer(view, np.uint8), data) for view in views)

    (batch,) = _through_buffers(server, b"".join(views))
    assert batch.memory is given[0]
    assert np.shares_memory(batch.data(), np.frombuffer(given[0], np.uint8))
    assert np.array_equal(batch.data(), data)


def _through_buffers(connection: Connection, stream: bytes) -> list[Any]:
    """Receive as a socket does, a bit less than the buffer each time."""
    at = 0
    while at < len(stream):
        buffer = connection.get_buffer()
        size = min(max(1, len(buffer) * 2 // 3), len(stream) - at)
        buffer[:size] = stream[at : at + size]
        connection.buffer_updated(size)
        at += size
    return list(connection.events())


def test_buffers_are_aligned() -> None:
    server, worker = opened()
    worker.send_batches(1, [packed(n, [np.ones(n, np.uint8), np.ones(3), "x" * 70]) for n in range(1, 80)])
    for batch in arrived(server, worker):
        for buffer in batch.buffers:
            assert np.frombuffer(buffer, np.uint8).ctypes.data % 64 == 0


def test_batches_without_payload() -> None:
    server, worker = opened(credit=0)
    worker.send_batches(1, [pack_batch(0, 0, np.empty(0, np.int64), {"n": 1})])
    (batch,) = arrived(server, worker)
    assert batch.data() == {"n": 1}
    assert len(batch.ids) == 0


def test_results_come_back() -> None:
    server, client = opened(Role.CLIENT)
    server.send_results(3, [pack_batch(0, 0, np.arange(2), {"accuracy": 0.5, "classes": np.arange(2)})])
    _, events = carry(server, client)
    assert isinstance(events[0], Result)
    assert events[0].stream == 3
    assert equal(events[0].data(), {"accuracy": 0.5, "classes": np.arange(2)})


class TestCompression:
    def test_the_receiver_learns_codec_and_sizes(self) -> None:
        server, worker = opened()
        batch = packed(0, np.zeros(5000))
        batch.compress(1, 1, memoryview(zlib.compress(batch.buffers[1])))
        worker.send_batches(1, [batch])
        (back,) = arrived(server, worker)
        assert back.compressed == {1: (1, 40_000)}
        assert back.raw_size == 40_000 + 64 * 8
        with pytest.raises(MisuseError, match=r"buffers \[1\] are still compressed"):
            back.data()
        with pytest.raises(PeerError, match="40000 bytes decompresses to 3"):
            back.decompressed(1, memoryview(b"abc"))

    def test_decompressed_by_the_caller(self) -> None:
        server, worker = opened()
        batch = packed(0, np.arange(500))
        for index in (0, 1):
            batch.compress(index, 1, memoryview(zlib.compress(batch.buffers[index])))
        worker.send_batches(1, [batch])
        (back,) = arrived(server, worker)
        with pytest.raises(MisuseError, match="ids are still compressed"):
            _ = back.ids
        for index in (0, 1):
            back.decompressed(index, memoryview(zlib.decompress(back.buffers[index])))
        assert np.array_equal(back.data(), np.arange(500))
        assert back.ids.tolist() == list(range(64))

    def test_only_codecs_that_were_agreed_on(self) -> None:
        server, worker = opened()
        batch = packed()
        batch.compress(1, 2, memoryview(b"x"))
        with pytest.raises(MisuseError, match=r"not agreed on \(\[1\]\)"):
            worker.send_batches(1, [batch])
        worker.codecs = frozenset({2})
        worker.send_batches(1, [batch])
        with pytest.raises(PeerError, match=r"codec 2; agreed were \[1\]"):
            server.receive_data(sent(worker))

    def test_a_bomb_is_refused_before_it_is_stored(self) -> None:
        server, worker = opened(max_payload=1 << 20)
        batch = packed(0, np.zeros(1 << 18))
        batch.compress(1, 1, memoryview(zlib.compress(batch.buffers[1])))
        with pytest.raises(MisuseError, match="the peer accepts 1048576"):
            worker.send_batches(1, [batch])
        worker._peer_max_payload = 1 << 30
        worker.send_batches(1, [batch])
        with pytest.raises(PeerError, match="decompressed"):
            server.receive_data(sent(worker))


class TestSharedMemory:
    def test_only_the_place_travels(self) -> None:
        segment = bytearray(1 << 16)

        def locate(number: int, begin: int, size: int) -> memoryview | None:
            return memoryview(segment)[begin : begin + size] if number == 4 else None

        server, worker = opened(shared=True, locate=locate)
        batch = packed()
        at = 128
        for buffer in batch.buffers:
            segment[at : at + len(buffer)] = buffer
            at += (len(buffer) + 63) & -64
        worker.send_batches(1, [batch], place=(4, 128))
        assert len(worker.data_to_send()) == 1
        worker.send_batches(1, [batch], place=(4, 128))
        offset = worker.sending.sent
        assert offset == 2 * batch.size

        server, worker = opened(shared=True, locate=locate)
        worker.send_batches(1, [batch], place=(4, 128))
        (back,) = arrived(server, worker)
        assert equal(back.data(), SMALL)
        assert np.shares_memory(np.frombuffer(back.buffers[1], np.uint8), np.frombuffer(segment, np.uint8))

        worker.send_batches(1, [batch], place=(5, 128))
        with pytest.raises(PeerError, match="shared segment 5, where there is none"):
            server.receive_data(sent(worker))

    def test_only_where_it_was_agreed_on(self) -> None:
        server, worker = opened()
        with pytest.raises(MisuseError):
            worker.send_batches(1, [packed()], place=(1, 0))
        worker.shared = True
        worker.send_batches(1, [packed()], place=(1, 0))
        with pytest.raises(PeerError, match="which was not agreed on"):
            server.receive_data(sent(worker))


def test_a_frame_has_batches_but_not_too_many() -> None:
    _, worker = opened()
    for count in (0, MAX_BATCHES + 1):
        with pytest.raises(MisuseError):
            worker.send_batches(1, [packed()] * count)


def test_a_frame_has_not_too_many_buffers() -> None:
    """Numbers without sides need no bytes of metadata each, so the metadata's length does not bound them."""
    server, worker = opened()
    many = [packed(n, [np.array(1)] * 1023) for n in range(17)]
    worker.send_batches(1, many[:16])
    assert len(arrived(server, worker)) == 16
    with pytest.raises(MisuseError, match="more than 16384 buffers"):
        worker.send_batches(1, many)
    records = [record(samples=0, layout=[0, [5, *[[0, 9, 0, 0]] * 1023]], values=[])]
    records += [record(samples=0, layout=0, values=[])] * 16
    with pytest.raises(PeerError, match="more than 16384 buffers"):
        server.receive_data(
            pack_head(Kind.BATCHES, msgpack.packb([records, None]), offset=worker.sending.sent, payload=1023 * 17 * 64)
        )


def test_a_description_that_is_too_long_leaves_the_connection_usable() -> None:
    server, worker = opened()
    many = [packed(n, {"x" * 60 + str(k): "y" * 60 for k in range(100)}) for n in range(100)]
    with pytest.raises(MisuseError, match="send fewer in one frame"):
        worker.send_batches(1, many)
    worker.send_batches(1, many[:3])
    assert len(arrived(server, worker)) == 3


@pytest.mark.parametrize("place", [(-1, 0, 0, 1), (0, -1, 0, 1), (0, 0, 1, 1), (2**32, 0, 0, 1)])
def test_impossible_places_are_refused_here(place: tuple[int, int, int, int]) -> None:
    epoch, step, rank, ranks = place
    with pytest.raises(MisuseError):
        pack_batch(epoch, step, np.arange(1), None, rank=rank, ranks=ranks)


RECORD: list[Any] = [0, 0, 0, 1, 1, 0.0, [0, [1]], [], [None], []]


def record(**changes: Any) -> list[Any]:
    names = ["epoch", "step", "rank", "ranks", "samples", "seconds", "layout", "dims", "values", "coded"]
    return [changes.get(name, value) for name, value in zip(names, RECORD)]


NONSENSE: list[Any] = [
    None, [], [[]], [[], None], [[1], None], [[[]], None], [[record()], [1, 2]], [[record()], None, None],
    *[[[record(**change)], None] for change in (
        {"epoch": -1}, {"epoch": 2**32}, {"epoch": 0.0}, {"epoch": None}, {"step": -1}, {"step": True}, {"rank": 1},
        {"ranks": 0}, {"samples": 9}, {"samples": -1}, {"samples": 2**40}, {"seconds": 0}, {"seconds": -1.0},
        {"seconds": float("nan")}, {"layout": 5}, {"layout": -1}, {"layout": None}, {"layout": [64, [1]]},
        {"layout": [-1, [1]]}, {"layout": ["a", [1]]}, {"layout": [0]}, {"dims": None}, {"dims": [1]},
        {"values": None},
        {"values": []}, {"values": [[]]}, {"values": [{}]}, {"values": ["x" * 65]}, {"coded": None}, {"coded": [1]},
        {"coded": [0, 9, 1]}, {"coded": [0, 1, -1]}, {"coded": [2, 1, 8]}, {"coded": [0, 1, 8, 0, 1, 8]},
        {"coded": [0, 1, 2**70 - 2**70 + 100]}, {"coded": {}},
    )],
]  # fmt: skip


def test_descriptions_that_make_no_sense_are_refused_before_memory_is_taken() -> None:
    def allocate(size: int, kind: Kind, stream: int) -> bytearray:
        raise AssertionError("memory was taken")

    for metadata in NONSENSE:
        server, _ = opened(allocate=allocate)
        with pytest.raises(PeerError) as caught:
            server.receive_data(pack_head(Kind.BATCHES, msgpack.packb(metadata), payload=64))
        assert caught.value.reason in (Reason.PROTOCOL, Reason.LIMIT)


def test_the_record_above_is_fine_when_nothing_is_changed() -> None:
    server, _ = opened()
    server.receive_data(pack_head(Kind.BATCHES, msgpack.packb([[record()], None]), payload=64) + bytes(64))
    (batch,) = server.events()
    assert isinstance(batch, Batch)
    assert batch.data() is None


def test_shared_payloads_need_a_place() -> None:
    for place in (None, [], [1], [1, -64], [1, 3], ["a", 0]):
        server, _ = opened(shared=True, locate=lambda *_: None)
        head = pack_head(Kind.BATCHES, msgpack.packb([[record()], place]), payload=64, flags=Flag.SHARED)
        assert len(head) > HEADER_SIZE
        with pytest.raises(PeerError):
            server.receive_data(head)


RUN: list[Any] = [0, 4, 0, 1, 6, 0.0, [0, [6, [0, 18, 2, 0], [7, ["a"], [0, 9, 1, 0]]]], [6, 5, 6], [], [], 3]
"""Three steps of two samples: float32 of 5 columns, and a dict of int64."""
RUN_SIZE = 64 + 128 + 64


def test_a_run_of_steps_is_one_record() -> None:
    server, _ = opened()
    server.receive_data(pack_head(Kind.BATCHES, msgpack.packb([[RUN], None]), payload=RUN_SIZE) + bytes(RUN_SIZE))
    (run,) = server.events()
    assert isinstance(run, Batch)
    assert (run.step, run.steps, len(run.ids)) == (4, 3, 6)


@pytest.mark.parametrize(
    "changes",
    [
        {10: 0}, {10: 1}, {10: -3}, {10: 4}, {10: True}, {10: 3.0}, {10: None}, {10: 2048},
        {7: [6, 5, 5]}, {7: [5, 6, 6]}, {7: [3, 10, 6]},
        {6: [0, [6, [0, 18, 2, 0], [0, 9, 1, 1]]]},
        {6: [0, [6, [0, 18, 2, 0], [7, ["a"], [0, 9, 1, 0]], [1]]], 8: [None]},
        {6: [0, [6, [0, 18, 2, 0], [7, ["a"], [4, 0, 2]]]]},
        {6: [0, [6, [0, 18, 2, 0], [8, "P", ["a"], [0, 9, 1, 0]]]]},
        {6: [0, [6, [0, 18, 2, 0], [0, 9, 1, 0], [0, 9, 0, 0]]]},
        {6: [0, [6]], 7: []},
    ],
)  # fmt: skip
def test_a_run_that_cannot_be_cut_into_its_steps_is_refused(changes: dict[int, Any]) -> None:
    server, _ = opened()
    changed = [changes.get(at, value) for at, value in enumerate(RUN)]
    with pytest.raises(PeerError):
        server.receive_data(pack_head(Kind.BATCHES, msgpack.packb([[changed], None]), payload=RUN_SIZE))


def test_the_steps_of_runs_count_as_batches_of_their_frame() -> None:
    server, worker = opened()
    runs = [[*RUN[:4], 900, *RUN[5:6], RUN[6] if not n else 0, [900, 5, 900], [], [], 450] for n in range(3)]
    with pytest.raises(PeerError, match="1024 batches"):
        server.receive_data(pack_head(Kind.BATCHES, msgpack.packb([runs, None]), payload=1 << 20))
    many = PackedBatch((0, 0, 0, 1, 0.0), memoryview(bytes(8 * 600)), ((1,), [], [None], []), 600)
    with pytest.raises(MisuseError, match="a frame of"):
        worker.send_batches(1, [many, many])
