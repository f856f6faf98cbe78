"""Streams: numbered batches of anything that can be iterated, with the weaker promise said aloud once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from distributed_training.data.stream import StreamSource
from distributed_training.runtime.errors import DataError

BATCHES = [torch.zeros(4, 1), torch.ones(3, 1), torch.full((2, 1), 2.0)]


class Epochs:
    """Anything that is told the epoch."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def values(source: StreamSource, *where: int) -> list[tuple[int, list[int], list[float]]]:
    return [(step, batch.ids.tolist(), batch.data.flatten().tolist()) for step, batch in source.batches(*where)]


def test_numbers_steps_and_samples_as_they_come() -> None:
    assert values(StreamSource(BATCHES), 0) == [
        (0, [0, 1, 2, 3], [0, 0, 0, 0]),
        (1, [4, 5, 6], [1, 1, 1]),
        (2, [7, 8], [2, 2]),
    ]


@pytest.mark.parametrize("start", [0, 1, 2, 3])
def test_resume_reads_past_what_was_used(start: int) -> None:
    source = StreamSource(BATCHES)
    assert values(source, 1, start) == values(source, 1)[start:]


def test_says_once_that_it_has_no_plan(caplog: pytest.LogCaptureFixture) -> None:
    source = StreamSource(BATCHES)
    with caplog.at_level(logging.WARNING):
        list(source.batches(0))
        list(source.batches(1))
    [record] = caplog.records
    assert record.getMessage() == (
        "list has no sample plan: order and resume are only as exact as its own iteration. "
        "Pass a map-style dataset for exact resume."
    )
    assert not source.exact


def test_length_is_known_where_the_iterable_has_one() -> None:
    assert StreamSource(BATCHES).steps_per_epoch == 3
    assert StreamSource(iter(BATCHES)).steps_per_epoch is None


def test_describes_nothing_and_closes_quietly() -> None:
    source = StreamSource(BATCHES)
    assert source.describe() == {}
    source.close()
    source.close()


class TestEpoch:
    def test_an_iterable_is_told(self) -> None:
        class Own(Epochs):
            def __iter__(self) -> Iterator[torch.Tensor]:
                return iter([torch.full((1,), float(self.epochs[-1]))])

        own = Own()
        source = StreamSource(own)
        assert [values(source, epoch)[0][2] for epoch in (0, 3)] == [[0], [3]]
        assert own.epochs == [0, 3]

    def test_a_loaders_dataset_is_told(self) -> None:
        class Stream(Epochs, IterableDataset):
            def __iter__(self) -> Iterator[int]:
                return iter(range(4))

        stream = Stream()
        list(StreamSource(DataLoader(stream, batch_size=2)).batches(2))
        assert stream.epochs == [2]

    def test_a_loaders_sampler_is_told(self) -> None:
        class Numbers(Dataset):
            def __len__(self) -> int:
                return 8

            def __getitem__(self, sample: int) -> int:
                return sample

        class Own(DistributedSampler):
            pass

        sampler = Own(Numbers(), num_replicas=1, rank=0)
        source = StreamSource(DataLoader(Numbers(), batch_size=8, sampler=sampler))
        assert values(source, 0)[0][2] != values(source, 1)[0][2]
        assert sampler.epoch == 1

    def test_a_loaders_batch_sampler_is_told(self) -> None:
        class Buckets(Epochs, Sampler):
            def __iter__(self) -> Iterator[list[int]]:
                return iter([[0, 1], [2]])

        buckets = Buckets()
        list(StreamSource(DataLoader(list(range(3)), batch_sampler=buckets)).batches(4))
        assert buckets.epochs == [4]


class TestNothingToRead:
    def test_an_empty_iterable_is_an_error(self) -> None:
        with pytest.raises(DataError, match="list gave no batch in epoch 0: the dataset is empty"):
            list(StreamSource([]).batches(0))

    @pytest.mark.parametrize("start", [0, 2])
    def test_a_generator_that_was_read_to_the_end_is_an_error(self, start: int) -> None:
        source = StreamSource(batch for batch in BATCHES)
        assert len(list(source.batches(0))) == 3
        with pytest.raises(DataError, match=r"generator gave no batch in epoch 1: .* can be read only once"):
            list(source.batches(1, start))

    def test_resuming_at_the_end_of_an_epoch_is_none(self) -> None:
        assert list(StreamSource(BATCHES).batches(0, 3)) == []


@pytest.mark.parametrize("data", [{"x": torch.zeros(5, 2)}, (torch.zeros(5, 2), torch.zeros(5)), [torch.zeros(5)]])
def test_batches_may_have_any_nesting(data: Any) -> None:
    [(_, batch)] = StreamSource([data]).batches(0)
    assert batch.size == 5
    assert batch.data is data
