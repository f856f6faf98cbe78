"""The embedded digits are those of scikit-learn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from tests.contract.dataset import DatasetContract

from distributed_training.config.schema import DataConfig
from distributed_training.data.base import Dataset
from distributed_training.data.sources import digits, load_dataset
from distributed_training.runtime.errors import DataError


class TestDigits(DatasetContract):
    @pytest.fixture
    def dataset(self) -> Dataset:
        return load_dataset(DataConfig()).train


def test_equal_to_scikit_learn() -> None:
    reference = load_digits()
    dataset = load_dataset(DataConfig(validation_fraction=0.0)).train
    images, labels = dataset.fetch(np.arange(len(dataset)))
    assert images.dtype == torch.float32
    assert images.shape == (1797, 1, 8, 8)
    assert np.array_equal(images[:, 0].numpy() * 16, reference.images)
    assert np.array_equal(labels.numpy(), reference.target)
    assert dataset.num_classes == 10


def test_split() -> None:
    splits = load_dataset(DataConfig(validation_fraction=0.2))
    assert splits.validation is not None
    assert (len(splits.train), len(splits.validation)) == (1438, 359)
    labels = splits.validation.fetch(np.arange(359))[1]
    assert len(labels.unique()) == 10


@pytest.mark.parametrize("content", [None, b"", b"PK\x03\x04 damaged"])
def test_damaged_asset(content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "digits.npz"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setattr(digits, "ASSET", path)
    with pytest.raises(DataError, match=r"digits\.npz: damaged or missing"):
        load_dataset(DataConfig())
