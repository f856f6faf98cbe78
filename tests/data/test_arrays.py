"""Datasets in arrays: every kind of array users have, and a fingerprint of their content."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.contract.dataset import DatasetContract

from distributed_training.data import arrays as arrays_module
from distributed_training.data.arrays import ArrayDataset
from distributed_training.runtime.errors import DataError

X = np.arange(12, dtype=np.float32).reshape(6, 2)
Y = np.arange(6) % 3


class TestTuple(DatasetContract):
    @pytest.fixture
    def dataset(self) -> ArrayDataset:
        return ArrayDataset((X, Y), num_classes=3)

    def test_a_batch_is_a_tuple(self, dataset: ArrayDataset) -> None:
        batch = dataset.fetch(np.array([4, 0]))
        assert isinstance(batch, tuple)
        assert batch[0].tolist() == [[8, 9], [0, 1]]
        assert batch[1].tolist() == [1, 0]


class TestDict(DatasetContract):
    @pytest.fixture
    def dataset(self) -> ArrayDataset:
        return ArrayDataset({"x": torch.from_numpy(X), "y": Y})

    def test_a_batch_is_a_dict(self, dataset: ArrayDataset) -> None:
        batch = dataset.fetch(np.array([1]))
        assert list(batch) == ["x", "y"]
        assert batch["x"].tolist() == [[2, 3]]


class TestOneArray(DatasetContract):
    @pytest.fixture
    def dataset(self) -> ArrayDataset:
        return ArrayDataset(X)

    def test_a_batch_is_a_tensor(self, dataset: ArrayDataset) -> None:
        assert dataset.fetch(np.array([5])).tolist() == [[10, 11]]


class TestMemoryMap(DatasetContract):
    @pytest.fixture
    def dataset(self, tmp_path: Path) -> ArrayDataset:
        np.save(tmp_path / "x.npy", X)
        return ArrayDataset((np.load(tmp_path / "x.npy", mmap_mode="r"), Y))

    def test_is_not_read_into_memory(self, tmp_path: Path) -> None:
        np.save(tmp_path / "x.npy", X)
        mapped = np.load(tmp_path / "x.npy", mmap_mode="c")
        dataset = ArrayDataset((mapped,))
        mapped[0, 0] = 99
        assert dataset.fetch(np.array([0]))[0][0, 0] == 99


class TestKindsOfArrays:
    @pytest.mark.parametrize(
        "dtype",
        [
            *("bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
            *("float16", "float32", "float64", "complex64"),
        ],
    )
    def test_every_number_type_keeps_its_type_and_values(self, dtype: str) -> None:
        array = np.array([[0, 1], [1, 0], [1, 1]]).astype(dtype)
        rows = ArrayDataset((array,)).fetch(np.array([2, 0, 2]))[0]
        assert rows.dtype == torch.from_numpy(array).dtype
        assert np.array_equal(rows.numpy(), array[[2, 0, 2]])

    @pytest.mark.parametrize(
        "array", [np.arange(6.0)[::-1], np.arange(6.0, dtype=">f4")[::-1], np.arange(12.0)[::2], [0.0, 1.0, 2.0]]
    )
    def test_reversed_foreign_and_strided_arrays_and_lists_are_taken(self, array: Any) -> None:
        rows = ArrayDataset((array,)).fetch(np.arange(3))[0]
        assert rows.tolist() == list(array[:3])

    def test_tensors_with_gradients_are_taken_as_data(self) -> None:
        rows = ArrayDataset((torch.ones(3, 2, requires_grad=True),)).fetch(np.arange(2))[0]
        assert not rows.requires_grad

    def test_bfloat16_has_a_fingerprint(self) -> None:
        one = ArrayDataset((torch.ones(3, 2, dtype=torch.bfloat16),))
        assert one.fingerprint() != ArrayDataset((torch.zeros(3, 2, dtype=torch.bfloat16),)).fingerprint()
        assert one.fetch(np.array([0]))[0].dtype == torch.bfloat16

    @pytest.mark.parametrize("array", [np.array(["a", "b"]), np.array([{}, None], dtype=object)])
    def test_what_is_not_a_number_is_refused_by_name(self, array: np.ndarray) -> None:
        with pytest.raises(DataError, match=r"mine\[words\]: values of type .* cannot become tensors"):
            ArrayDataset({"words": array}, name="mine")

    def test_a_single_value_is_refused(self) -> None:
        with pytest.raises(DataError, match=r"arrays\[1\]: a single value"):
            ArrayDataset((X, 5))

    def test_arrays_of_different_length_are_refused(self) -> None:
        with pytest.raises(DataError, match=r"differ in length: \{'0': 6, '1': 5\}"):
            ArrayDataset((X, Y[:5]))

    def test_no_arrays_are_no_samples(self) -> None:
        assert len(ArrayDataset(())) == 0


class TestFingerprint:
    def test_tells_content_type_shape_and_name_apart(self) -> None:
        changed = X.copy()
        changed[5, 1] += 1
        datasets = [
            ArrayDataset((X,)),
            ArrayDataset((changed,)),
            ArrayDataset((X.astype(np.float64),)),
            ArrayDataset((X.reshape(6, 1, 2),)),
            ArrayDataset({"x": X}),
            ArrayDataset((X,), name="other"),
        ]
        assert len({dataset.fingerprint() for dataset in datasets}) == len(datasets)

    def test_is_the_same_for_tensors_and_arrays(self) -> None:
        assert ArrayDataset((X,)).fingerprint() == ArrayDataset((torch.from_numpy(X),)).fingerprint()

    def test_large_arrays_are_hashed_in_spread_rows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(arrays_module, "_WHOLE", 1000)
        monkeypatch.setattr(arrays_module, "_ROWS", 3)
        large = np.zeros((1001, 2), dtype=np.float32)
        before = ArrayDataset(large).fingerprint()
        for row, seen in ((0, True), (500, True), (1000, True), (1, False)):
            changed = large.copy()
            changed[row] = 1
            assert (ArrayDataset(changed).fingerprint() != before) is seen
