"""The held-out part: fixed, complete, and independent of everything but the number of samples."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from tests.contract.dataset import DatasetContract

from distributed_training.data.arrays import ArrayDataset
from distributed_training.data.base import KeyedDataset
from distributed_training.data.sources.split import Subset, hold_out, mix64
from distributed_training.data.torch_dataset import fetch
from distributed_training.runtime.errors import DataError


def numbers(count: int) -> ArrayDataset:
    """Samples that are their own ids."""
    return ArrayDataset((torch.arange(count), torch.arange(count) % 3), num_classes=3, name="numbers")


def ids_of(dataset: Any) -> list[int]:
    return dataset.fetch(np.arange(len(dataset)))[0].tolist()


class TestSubset(DatasetContract):
    @pytest.fixture
    def dataset(self) -> Subset:
        return Subset(numbers(20), np.array([3, 19, 5, 7]))

    def test_maps_ids(self, dataset: Subset) -> None:
        assert ids_of(dataset) == [3, 19, 5, 7]
        assert dataset.num_classes == 3

    def test_fingerprint_tells_other_samples_apart(self, dataset: Subset) -> None:
        assert dataset.fingerprint() == Subset(numbers(20), np.array([3, 19, 5, 7])).fingerprint()
        assert dataset.fingerprint() != Subset(numbers(20), np.array([3, 19, 5, 8])).fingerprint()
        assert dataset.fingerprint() != Subset(numbers(21), np.array([3, 19, 5, 7])).fingerprint()

    def test_an_array_dataset_is_asked_once_for_the_whole_batch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        base, asked = numbers(20), []
        original = base.fetch
        monkeypatch.setattr(base, "fetch", lambda ids: (asked.append(ids.tolist()), original(ids))[1])
        Subset(base, np.array([4, 2, 9])).fetch(np.array([2, 0]))
        assert asked == [[9, 4]]

    def test_random_parts_are_keyed_by_the_id_in_the_whole_dataset(self) -> None:
        class Keyed(KeyedDataset):
            def __len__(self) -> int:
                return 10

            def fetch_keyed(self, ids: np.ndarray, key: int) -> Any:
                return torch.from_numpy(ids * 100 + key)

            def fingerprint(self) -> str:
                return "keyed"

        subset = Subset(Keyed(), np.array([7, 3]))
        assert fetch(subset, np.array([0, 1]), 5).tolist() == [705, 305]
        assert subset.fetch(np.array([1])).tolist() == [300]


class TestHoldOut:
    def test_parts_are_disjoint_and_complete(self) -> None:
        splits = hold_out(numbers(100), 0.2)
        train, held = ids_of(splits.train), ids_of(splits.validation)
        assert (len(train), len(held)) == (80, 20)
        assert sorted(train + held) == list(range(100))
        assert train == sorted(train)

    def test_the_choice_never_changes(self) -> None:
        # Recorded once: a run resumed with a later release or another NumPy must not train on held-out samples.
        assert ids_of(hold_out(numbers(30), 0.2).validation) == HELD_OF_30

    def test_another_seed_is_another_choice(self) -> None:
        assert ids_of(hold_out(numbers(100), 0.2).validation) != ids_of(hold_out(numbers(100), 0.2, seed=1).validation)

    def test_is_spread_evenly(self) -> None:
        held = np.array(ids_of(hold_out(numbers(10_000), 0.2).validation))
        assert 850 < (held < 5000).sum() < 1150

    def test_zero_holds_nothing_out(self) -> None:
        base = numbers(5)
        splits = hold_out(base, 0.0)
        assert splits.train is base
        assert splits.validation is None

    @pytest.mark.parametrize(("count", "fraction", "part"), [(2, 0.2, "validation"), (1, 0.9, "training")])
    def test_an_empty_part_is_refused(self, count: int, fraction: float, part: str) -> None:
        with pytest.raises(
            DataError, match=f"validation_fraction={fraction} of {count} samples leaves none for {part}"
        ):
            hold_out(numbers(count), fraction)

    def test_parts_survive_pickling(self) -> None:
        part = hold_out(numbers(50), 0.5).validation
        assert ids_of(pickle.loads(pickle.dumps(part))) == ids_of(part)


def test_mix64_is_splitmix64() -> None:
    # The first outputs of the reference generator started at 0.
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    assert mix64(np.array([0], dtype=np.uint64)).tolist() == expected[:1]
    assert mix64(np.array([0x9E3779B97F4A7C15], dtype=np.uint64)).tolist() == expected[1:]


HELD_OF_30 = [3, 10, 11, 18, 20, 21]
