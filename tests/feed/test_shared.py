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
