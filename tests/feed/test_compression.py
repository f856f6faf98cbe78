"""Compression is undone exactly, and used only where it makes the link faster."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.launching import need

from distributed_training.data import ArrayDataset
from distributed_training.feed.compression import CODECS, Compressor
from distributed_training.feed.tensors import as_raw
from distributed_training.wire import PackedBatch, pack_batch


@pytest.fixture(autouse=True)
def _codecs() -> None:
    need("lz4 or zstandard: pip install -e '.[feed]'", bool(CODECS))


def packed(data: object) -> PackedBatch:
    return pack_batch(0, 0, np.arange(4), data, adapt=as_raw)


ZEROS = torch.zeros(4, 100_000, dtype=torch.uint8)
NOISE = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (4, 100_000), dtype=np.uint8))


@pytest.mark.parametrize("number", CODECS)
def test_what_is_compressed_comes_back(number: int) -> None:
    codec = CODECS[number]
    data = codec.compress(NOISE.numpy().data)
    assert codec.decompress(data, NOISE.numel()) == NOISE.numpy().tobytes()
    with pytest.raises(Exception, match=r".+"):
        codec.decompress(data, 100)
    with pytest.raises(Exception, match=r".+"):
        codec.decompress(data[: len(data) // 2], NOISE.numel())


def test_it_is_used_on_a_slow_link_for_what_can_be_compressed() -> None:
    compressor = Compressor(frozenset(CODECS))
    assert not compressor.apply(packed(ZEROS))  # nothing is known of the link
    compressor.bandwidth = 1e6
    batch = packed(ZEROS)
    assert compressor.apply(batch)
    assert batch.size < 10_000
    assert list(batch.coded) == [1]


def test_it_is_not_used_where_it_does_not_help() -> None:
    slow, quick = Compressor(frozenset(CODECS)), Compressor(frozenset(CODECS))
    slow.bandwidth, quick.bandwidth = 1e6, 1e15
    assert not slow.apply(packed(NOISE))
    assert not quick.apply(packed(ZEROS))
    assert not Compressor(frozenset()).apply(packed(ZEROS))


def test_rows_that_are_not_gathered_can_be_compressed() -> None:
    compressor = Compressor(frozenset(CODECS))
    compressor.bandwidth = 1e6
    ids = np.array([1, 3])
    batch = packed(ArrayDataset(ZEROS).rows(ids))
    assert compressor.apply(batch)
    codec, _ = batch.coded[1]
    assert CODECS[codec].decompress(batch.buffers[1], 200_000) == bytes(200_000)
