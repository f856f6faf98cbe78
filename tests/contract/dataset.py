"""What every dataset has to pass. A dataset's own test inherits `DatasetContract` and gives a fixture `dataset`."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import torch

from distributed_training.data.base import Dataset
from distributed_training.data.nested import map_tensors


def tensors(batch: Any) -> list[torch.Tensor]:
    """The tensors of a batch, in order."""
    found: list[torch.Tensor] = []
    map_tensors(lambda t: (found.append(t), t)[1], batch)
    return found


def assert_equal(one: Any, other: Any) -> None:
    """Refuse batches that differ in anything."""
    first, second = tensors(one), tensors(other)
    assert len(first) == len(second) > 0
    for a, b in zip(first, second):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


class DatasetContract:
    """Inherit as `class TestX(DatasetContract)` and give a fixture `dataset` of at least 3 samples, not all alike."""

    def test_has_a_length(self, dataset: Dataset) -> None:
        assert len(dataset) >= 3

    def test_a_batch_has_a_row_for_each_id(self, dataset: Dataset) -> None:
        for ids in ([0], [0, 1, 2], [len(dataset) - 1, 0]):
            for tensor in tensors(dataset.fetch(np.array(ids))):
                assert len(tensor) == len(ids)

    def test_no_ids_give_a_batch_without_rows(self, dataset: Dataset) -> None:
        whole = tensors(dataset.fetch(np.array([0])))
        empty = tensors(dataset.fetch(np.array([], dtype=np.int64)))
        assert [(0, *t.shape[1:]) for t in whole] == [tuple(t.shape) for t in empty]
        assert [t.dtype for t in whole] == [t.dtype for t in empty]

    def test_rows_come_in_the_order_of_the_ids(self, dataset: Dataset) -> None:
        ids = np.array([2, 0, len(dataset) - 1])
        together = tensors(dataset.fetch(ids))
        for row, sample in enumerate(ids):
            alone = tensors(dataset.fetch(np.array([sample])))
            for a, b in zip(together, alone):
                assert torch.equal(a[row], b[0])

    def test_an_id_may_occur_twice(self, dataset: Dataset) -> None:
        for tensor in tensors(dataset.fetch(np.array([1, 0, 1]))):
            assert torch.equal(tensor[0], tensor[2])

    def test_the_same_ids_give_the_same_samples(self, dataset: Dataset) -> None:
        ids = np.arange(len(dataset))[:16]
        assert_equal(dataset.fetch(ids), dataset.fetch(ids))

    def test_a_batch_belongs_to_the_caller(self, dataset: Dataset) -> None:
        ids = np.array([0, 1, 2])
        before = [t.clone() for t in tensors(dataset.fetch(ids))]
        for tensor in tensors(dataset.fetch(ids)):
            tensor.fill_(1).add_(1)
        assert_equal(before, dataset.fetch(ids))
        assert ids.tolist() == [0, 1, 2]

    def test_survives_pickling(self, dataset: Dataset) -> None:
        copy = pickle.loads(pickle.dumps(dataset))
        ids = np.arange(min(len(dataset), 16))
        assert len(copy) == len(dataset)
        assert copy.num_classes == dataset.num_classes
        assert copy.fingerprint() == dataset.fingerprint()
        assert_equal(copy.fetch(ids), dataset.fetch(ids))

    def test_fingerprint_is_short_and_stable(self, dataset: Dataset) -> None:
        assert dataset.fingerprint() == dataset.fingerprint()
        assert 8 <= len(dataset.fingerprint()) <= 64

    def test_labels_lie_within_the_classes(self, dataset: Dataset) -> None:
        if dataset.num_classes is None:
            return
        labels = tensors(dataset.fetch(np.arange(len(dataset))[:1000]))[-1]
        assert labels.dtype == torch.int64
        assert labels.min() >= 0
        assert labels.max() < dataset.num_classes
