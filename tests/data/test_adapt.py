"""What users have, as batch sources: ordinary loaders are planned anew, everything else is streamed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data import Dataset as TorchBase

from distributed_training.data.adapt import as_source, replan
from distributed_training.data.arrays import ArrayDataset
from distributed_training.data.base import BatchSource
from distributed_training.data.loader import Loader
from distributed_training.data.plan import Plan
from distributed_training.data.stream import StreamSource
from distributed_training.runtime.errors import DataError

PLAN = Plan(0, 4, seed=3)
SAMPLES = TensorDataset(torch.arange(10), torch.arange(10) * 2)


class Squares(TorchBase):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, sample: int) -> tuple[int, int]:
        return sample, sample**2


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def ids(source: BatchSource, epoch: int = 0) -> list[list[int]]:
    return [batch.ids.tolist() for _, batch in source.batches(epoch)]


def first_column(source: BatchSource, epoch: int = 0) -> list[int]:
    return [int(x) for _, batch in source.batches(epoch) for x in batch.data[0]]


class TestOrdinaryLoaders:
    def test_a_sequential_loader_keeps_its_order_and_batch_size(self) -> None:
        source = as_source(DataLoader(SAMPLES, batch_size=3), PLAN)
        assert isinstance(source, Loader)
        assert source.plan == Plan(10, 3, seed=3, shuffle=False)
        assert ids(source) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
        assert first_column(source) == list(range(10))

    def test_a_shuffling_loader_is_shuffled_by_the_plan(self) -> None:
        source = as_source(DataLoader(SAMPLES, batch_size=3, shuffle=True, drop_last=True), PLAN)
        assert source.plan == Plan(10, 3, seed=3, shuffle=True, drop_last=True)
        assert first_column(source, 2) == np.concatenate(ids(source, 2)).tolist()
        assert len(set(first_column(source))) == 9

    @pytest.mark.parametrize("shuffle", [True, False])
    def test_a_distributed_loader_states_the_batch_of_one_rank(self, shuffle: bool) -> None:
        sampler = DistributedSampler(SAMPLES, num_replicas=2, rank=1, shuffle=shuffle)
        source = replan(DataLoader(SAMPLES, batch_size=2, sampler=sampler), seed=3)
        assert source.plan == Plan(10, 4, seed=3, shuffle=shuffle)
        assert sorted(first_column(source)) == list(range(10))

    def test_collation_is_kept(self) -> None:
        loader = DataLoader(Squares(), batch_size=5, collate_fn=lambda rows: torch.tensor([y for _, y in rows]))
        assert [batch.data.tolist() for _, batch in as_source(loader, PLAN).batches(0)] == [
            [0, 1, 4, 9, 16],
            [25, 36, 49, 64, 81],
        ]

    def test_a_batch_larger_than_the_dataset_is_the_whole_dataset(self) -> None:
        assert ids(as_source(DataLoader(SAMPLES, batch_size=64), PLAN)) == [list(range(10))]

    def test_workers_are_kept(self) -> None:
        with closing(as_source(DataLoader(Squares(), batch_size=4, num_workers=1), PLAN)) as source:
            assert source._num_workers == 1
            assert first_column(source) == list(range(10))

    @pytest.mark.parametrize(("timeout", "deadline"), [(0, 33.0), (12, 12)])
    def test_the_loaders_own_timeout_goes_before_the_deadline(self, timeout: float, deadline: float) -> None:
        loader = DataLoader(Squares(), num_workers=1, timeout=timeout)
        assert as_source(loader, PLAN, deadline=33.0)._deadline == deadline

    def test_an_empty_dataset_is_refused_by_name(self) -> None:
        with pytest.raises(DataError, match="TensorDataset: the dataset is empty"):
            as_source(DataLoader(TensorDataset(torch.zeros(0))), PLAN)


class TestStreamedLoaders:
    @pytest.mark.parametrize(
        "sampler",
        [
            WeightedRandomSampler([1.0] * 10, 10),
            RandomSampler(SAMPLES, replacement=True),
            RandomSampler(SAMPLES, num_samples=5),
            SubsetRandomSampler(range(4)),
            SequentialSampler(range(4)),
            RandomSampler(range(4)),
            DistributedSampler(range(4), num_replicas=1, rank=0),
        ],
        ids=lambda sampler: type(sampler).__name__,
    )
    def test_a_sampler_with_a_choice_of_its_own_is_left_to_choose(self, sampler: Any) -> None:
        loader = DataLoader(SAMPLES, batch_size=2, sampler=sampler)
        source = as_source(loader, PLAN)
        assert isinstance(source, StreamSource)
        assert len(first_column(source)) == len(sampler)

    def test_a_subclass_of_an_ordinary_sampler_is_left_to_choose(self) -> None:
        class Backwards(SequentialSampler):
            def __iter__(self) -> Iterator[int]:
                return iter(range(9, -1, -1))

        source = as_source(DataLoader(SAMPLES, batch_size=5, sampler=Backwards(SAMPLES)), PLAN)
        assert first_column(source) == list(range(9, -1, -1))

    def test_a_custom_batch_sampler_is_kept(self) -> None:
        class Buckets(Sampler):
            def __iter__(self) -> Iterator[list[int]]:
                return iter([[1, 0], [9]])

        for batches in (Buckets(), BatchSampler(SequentialSampler(SAMPLES), 4, False)):
            assert isinstance(as_source(DataLoader(SAMPLES, batch_sampler=batches), PLAN), StreamSource)
        assert first_column(as_source(DataLoader(SAMPLES, batch_sampler=Buckets()), PLAN)) == [1, 0, 9]

    def test_unbatched_and_iterable_loaders_are_iterated(self) -> None:
        assert isinstance(as_source(DataLoader(SAMPLES, batch_size=None), PLAN), StreamSource)
        source = as_source(DataLoader(Stream(), batch_size=4), PLAN)
        assert isinstance(source, StreamSource)
        assert [batch.data.tolist() for _, batch in source.batches(0)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


class TestOtherData:
    @pytest.mark.parametrize("data", [Squares(), SAMPLES, ArrayDataset((torch.arange(10), torch.zeros(10)))])
    def test_a_dataset_is_planned(self, data: Any) -> None:
        source = as_source(data, PLAN, deadline=7)
        assert isinstance(source, Loader)
        assert source.plan == Plan(10, 4, seed=3)
        assert first_column(source) == np.concatenate(ids(source)).tolist()

    @pytest.mark.parametrize("kind", [torch.from_numpy, np.asarray])
    def test_arrays_are_planned(self, kind: Any) -> None:
        x, y = kind(np.arange(10)), kind(np.arange(10) * 2)
        for data in ((x, y), {"x": x, "y": y}, x):
            source = as_source(data, PLAN)
            assert source.plan == Plan(10, 4, seed=3)
            _, batch = next(source.batches(0))
            rows = {tuple: lambda d: d[0], dict: lambda d: d["x"]}.get(type(data), lambda d: d)(batch.data)
            assert rows.tolist() == batch.ids.tolist()

    def test_a_source_is_taken_as_it_is(self) -> None:
        for source in (StreamSource([torch.zeros(2)]), Loader(ArrayDataset(torch.zeros(9)), Plan(9, 2))):
            assert as_source(source, PLAN) is source

    def test_a_list_of_batches_and_a_generator_are_streamed(self) -> None:
        batches = [(torch.arange(2), torch.zeros(2)), (torch.arange(3), torch.zeros(3))]
        for data in (batches, tuple(batches), (batch for batch in batches), Stream()):
            assert isinstance(as_source(data, PLAN), StreamSource)
        assert ids(as_source(batches, PLAN)) == [[0, 1], [2, 3, 4]]

    @pytest.mark.parametrize("data", [5, None, object(), len])
    def test_nonsense_is_refused_with_what_would_do(self, data: Any) -> None:
        with pytest.raises(DataError, match=f"cannot read batches from {type(data).__name__}; pass a DataLoader"):
            as_source(data, PLAN)

    def test_an_empty_dataset_is_refused(self) -> None:
        for every_sample in (False, True):
            with pytest.raises(DataError, match="the dataset is empty"):
                as_source((torch.zeros(0), torch.zeros(0)), PLAN, every_sample=every_sample)


class TestEverySample:
    @pytest.mark.parametrize(
        "data",
        [
            Squares(),
            (torch.arange(10), torch.zeros(10)),
            DataLoader(SAMPLES, batch_size=4, shuffle=True, drop_last=True),
            DataLoader(SAMPLES, batch_size=4),
            Loader(ArrayDataset((torch.arange(10),)), Plan(10, 4, drop_last=True)),
        ],
        ids=["dataset", "arrays", "shuffling loader", "loader", "source"],
    )
    def test_comes_once_and_in_order(self, data: Any) -> None:
        source = as_source(data, Plan(0, 4, drop_last=True), every_sample=True)
        assert ids(source, 5) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        assert first_column(source) == list(range(10))

    def test_the_batch_shrinks_to_the_dataset(self) -> None:
        assert ids(as_source(Squares(), Plan(0, 64), every_sample=True)) == [list(range(10))]

    def test_a_stream_stays_as_it_is(self) -> None:
        assert isinstance(as_source([torch.zeros(2)], PLAN, every_sample=True), StreamSource)


def test_an_iterable_dataset_by_itself_is_batched() -> None:
    source = as_source(Stream(), Plan(0, 4))
    assert isinstance(source, StreamSource)
    first = next(iter(source.batches(0)))[1]
    assert first.size == 4


def test_a_class_with_length_and_items_is_a_dataset() -> None:
    class Squares:
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> int:
            return index * index

        def __iter__(self) -> object:
            raise AssertionError("must be read by number")

    source = as_source(Squares(), Plan(0, 3, shuffle=False))
    assert [batch.data.tolist() for _, batch in source.batches(0)] == [[0, 1, 4], [9, 16, 25]]
