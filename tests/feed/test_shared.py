"""Batches in shared memory: found where they were put, freed when nobody looks, and no peer can make a read fail."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from distributed_training.data import ArrayDataset
from distributed_training.data.base import LooseRows
from distributed_training.feed.shared import Arena, Segments, host_id
from distributed_training.feed.tensors import as_raw
from distributed_training.runtime.errors import DataError
from distributed_training.wire import PackedBatch, pack_batch


def packed(value: int, size: int = 100_000) -> PackedBatch:
    return pack_batch(0, 0, np.arange(3), torch.full((size,), value, dtype=torch.uint8), adapt=as_raw)


def test_a_payload_is_where_it_was_put_until_nobody_looks() -> None:
    arena, segments = Arena(4 << 20), Segments()
    places = [arena.write([packed(value)]) for value in range(6)]
    seen = []
    for value, place in enumerate(places):
        assert place is not None
        memory = segments.locate(*place, packed(value).size)
        assert memory is not None
        assert memory[64 : 64 + 100_000].tolist() == [value] * 100_000
        seen.append(memory[64:])
        del memory
    while (place := arena.write([packed(9)])) is not None:  # until no slot is free
        places.append(place)
    del seen[2]
    assert arena.write([packed(9)]) == places[2]
    arena.close()
    assert bytes(seen[1][:3]) == bytes([1, 1, 1])  # still mapped
    segments.close()


def test_rows_are_gathered_into_their_place() -> None:
    dataset = ArrayDataset(np.random.default_rng(0).standard_normal((50, 1000)))
    ids = np.array([7, 3, 49])
    batch = pack_batch(0, 0, ids, dataset.rows(ids), adapt=as_raw)
    arena, segments = Arena(1 << 20), Segments()
    place = arena.write([batch])
    assert place is not None
    memory = segments.locate(*place, batch.size)
    assert memory is not None
    assert torch.equal(torch.frombuffer(memory[64:24064], dtype=torch.float64).view(3, 1000), dataset.fetch(ids))
    arena.close()


def loose(*shapes: int) -> PackedBatch:
    samples = [torch.full((2, shape), at, dtype=torch.bfloat16).T for at, shape in enumerate(shapes)]
    return pack_batch(0, 0, np.arange(len(shapes)), LooseRows(samples), adapt=as_raw)


def test_samples_are_stacked_in_their_place() -> None:
    batch = loose(50_000, 50_000, 50_000)
    arena, segments = Arena(4 << 20), Segments()
    place = arena.write([batch])
    assert place is not None
    memory = segments.locate(*place, batch.size)
    assert memory is not None
    rows = torch.frombuffer(memory[64 : 64 + 600_000], dtype=torch.bfloat16).view(3, 50_000, 2)
    assert [row.unique().tolist() for row in rows] == [[0], [1], [2]]
    arena.close()


def test_samples_that_are_not_alike_leave_their_place_free() -> None:
    arena = Arena(16 << 20)
    first = arena.write([loose(50_000, 50_000)])
    after = arena.write([loose(50_000, 50_000)])
    assert first is not None
    assert after is not None
    for shapes in ((50_000, 50_001), (50_001, 50_000)):
        with pytest.raises(DataError, match="do not fit together"):
            arena.write([loose(*shapes)])
    third = arena.write([loose(50_000, 50_000)])
    assert third == (first[0], 2 * after[1] - first[1])  # the very next one
    arena.close()


def loaded(arena: Arena, rows: int, width: int = 3000) -> tuple[PackedBatch, list[torch.Tensor]]:
    """Samples that are put together where the arena says."""
    memory = arena.room(rows, width * 4 + 8)
    assert memory is not None
    data = [memory.empty((rows, width), dtype=torch.float32), memory.empty((rows,), dtype=torch.int64)]
    data[0].copy_(torch.arange(rows)[:, None].expand(-1, width))
    data[1].copy_(-torch.arange(rows))
    return pack_batch(0, 0, np.arange(rows) + 7, data, adapt=as_raw), data


def check(segments: Segments, place: tuple[int, int] | None, rows: int, size: int, width: int = 3000) -> None:
    """That the batch of `loaded` lies there."""
    assert place is not None
    memory = segments.locate(*place, size)
    assert memory is not None
    ids = -(-rows * 8 // 64) * 64
    numbers = torch.frombuffer(memory[ids : ids + rows * width * 4], dtype=torch.float32).view(rows, width)
    at = ids + -(-rows * width * 4 // 64) * 64
    assert torch.frombuffer(memory[: rows * 8], dtype=torch.int64).tolist() == list(range(7, 7 + rows))
    assert numbers.unique(dim=1).flatten().tolist() == list(range(rows))
    assert torch.frombuffer(memory[at : at + rows * 8], dtype=torch.int64).tolist() == [-row for row in range(rows)]


def test_samples_that_are_put_together_in_their_place_stay_there() -> None:
    arena, segments = Arena(8 << 20), Segments()
    assert arena.finish([packed(1)]) is None, "nothing was to be put together there"
    for rows in (1, 5, 16):
        batch, data = loaded(arena, rows)
        size = batch.size
        place = arena.finish([batch])
        check(segments, place, rows, size)
        assert torch.equal(data[1], -torch.arange(rows)), "there was no other copy"
        data[0].zero_()
        assert place is not None
        memory = segments.locate(*place, size)
        assert memory is not None
        assert not any(memory[128 : 128 + 12000]), "so who looks there sees a change"
    arena.close()


@pytest.mark.parametrize("how", ["another order", "another batch beside it", "more than was said", "other ids"])
def test_what_does_not_lie_as_it_is_sent_is_written_as_ever(how: str) -> None:
    arena, segments = Arena(8 << 20), Segments()
    batch, data = loaded(arena, 16)
    batches = [batch]
    if how == "another order":
        batch.buffers[1:] = batch.buffers[:0:-1]
    elif how == "another batch beside it":
        batches.append(packed(3))
    elif how == "other ids":
        batches = [pack_batch(0, 0, np.arange(3), data, adapt=as_raw)]
    else:
        memory = arena.room(2, 100)
        assert memory is not None
        data = [memory.empty((200_000,), dtype=torch.float32).fill_(2.0)]
        batches = [pack_batch(0, 0, np.arange(2), data, adapt=as_raw)]
    expected = [bytes(buffer) for one in batches for buffer in one.buffers]  # type: ignore[arg-type]
    size = sum(one.size for one in batches)
    assert arena.finish(batches) is None
    data[0].zero_()  # that memory is for others now
    place = arena.write(batches)
    assert place is not None
    memory = segments.locate(*place, size)
    assert memory is not None
    at = 0
    for part in expected:
        assert bytes(memory[at : at + len(part)]) == part
        at += -(-len(part) // 64) * 64
    arena.close()


def test_a_slot_whose_samples_never_came_is_free_again_and_nobody_else_writes_there() -> None:
    arena, segments = Arena(2 << 20), Segments()
    for _ in range(50):
        loaded(arena, 16)  # those of a lease that was taken back meanwhile
    batch, _ = loaded(arena, 16)
    size, others = batch.size, []
    while (place := arena.write([packed(9)])) is not None:
        others.append(place)
    assert len(set(others)) == len(others) > 1
    check(segments, arena.finish([batch]), 16, size)
    arena.close()


def test_without_room_there_is_none() -> None:
    arena = Arena(1 << 20)
    assert arena.room(1000, 12_008) is None
    assert arena.finish([packed(1)]) is None
    held = 0
    while arena.room(10, 5000) is not None and arena.write([packed(2)]) is not None:
        held += 1
    assert held
    arena.close()


def test_a_place_that_is_none_is_refused(tmp_path: Path) -> None:
    arena, segments = Arena(1 << 20), Segments()
    place = arena.write([packed(1)])
    assert place is not None
    number, begin = place
    assert segments.locate(number, 0, 64) is None
    assert segments.locate(number, begin, 1 << 20) is None
    assert segments.locate(number, 1 << 40, 1) is None
    process = number >> 41
    unsealed = os.memfd_create("dtrain-feed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 1 << 20)
    file = os.open(tmp_path / "memfd:dtrain-feed", os.O_RDWR | os.O_CREAT)
    for descriptor in (unsealed, file, 0, 60_000):  # one that may shrink, a file, whatever 0 is, nothing
        assert segments.locate((process << 16 | descriptor) << 25, 64, 64) is None
    assert segments.locate(number ^ 1, begin, 64) is None  # the descriptor is another segment now
    assert segments.locate((1 << 16 | 3) << 25, 64, 64) is None  # another process
    assert segments.locate(2**62, 64, 64) is None
    os.close(unsealed)
    os.close(file)
    arena.close()


def test_a_segment_stays_until_the_other_side_has_seen_it() -> None:
    arena, segments = Arena(64 << 20), Segments()
    small = arena.write([packed(1, 1000)])
    large = arena.write([packed(2, 500_000)])  # needs slots of another size
    larger = arena.write([packed(3, 900_000)])
    seen = []
    for place, value, size in ((small, 1, 1000), (large, 2, 500_000), (larger, 3, 900_000)):
        assert place is not None
        memory = segments.locate(*place, packed(value, size).size)
        assert memory is not None
        assert bytes(memory[64 : 64 + size]) == bytes([value]) * size
        seen.append(memory)
    del memory
    seen.clear()
    assert len(arena._former) == 2
    assert arena.write([packed(4, 900_000)]) == larger
    assert not arena._former
    arena.close()


def test_it_has_no_name_and_cannot_shrink() -> None:
    arena = Arena(1 << 20)
    place = arena.write([packed(1)])
    assert place is not None
    descriptor = place[0] >> 25 & (1 << 16) - 1
    assert os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:")
    try:
        os.ftruncate(descriptor, 0)
    except PermissionError:
        pass
    else:
        raise AssertionError("a reader would be killed")
    arena.close()


def test_a_host_is_one_machine_for_one_user() -> None:
    assert host_id() == host_id()
    assert len(host_id()) == 32
