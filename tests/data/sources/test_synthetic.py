"""Images from ids: the same everywhere, learnable, and as many as one likes."""

from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest
import torch
from tests.contract.dataset import DatasetContract

from distributed_training.config.schema import DataConfig
from distributed_training.data.base import Dataset, Splits
from distributed_training.data.sources import load_dataset
from distributed_training.runtime.errors import ConfigError, DataError


def load(fraction: float = 0.2, **args: object) -> Splits:
    return load_dataset(DataConfig(dataset="synthetic", args=args, validation_fraction=fraction))


class TestSynthetic(DatasetContract):
    @pytest.fixture
    def dataset(self) -> Dataset:
        return load().train

    def test_defaults(self, dataset: Dataset) -> None:
        images, labels = dataset.fetch(np.arange(800))
        assert len(dataset) == 800
        assert images.shape == (800, 3, 32, 32)
        assert images.dtype == torch.float32
        assert images.abs().max() <= 1.5
        assert len(labels.unique()) == dataset.num_classes == 10


def test_samples_never_change() -> None:
    # Recorded once: synthetic runs stay comparable over releases and machines.
    images, labels = load(shape=[2, 5], samples=100).train.fetch(np.arange(12))
    assert labels.tolist() == LABELS
    assert np.allclose(images[3, 1].tolist(), PIXELS, atol=1e-6)


def test_a_linear_model_learns_it() -> None:
    splits = load(samples=1200, shape=[3, 16, 16], noise=1.0)
    assert splits.validation is not None
    x, y = splits.train.fetch(np.arange(len(splits.train)))
    held, truth = splits.validation.fetch(np.arange(len(splits.validation)))
    weights = torch.linalg.lstsq(x.flatten(1), torch.nn.functional.one_hot(y, 10).float()).solution
    assert ((held.flatten(1) @ weights).argmax(1) == truth).float().mean() > 0.95


def test_without_noise_a_class_has_one_image() -> None:
    images, labels = load(noise=0.0, classes=3).train.fetch(np.arange(50))
    for label in range(3):
        assert len(images[labels == label].unique(dim=0)) == 1
    assert len(images.unique(dim=0)) == 3


def test_noise_differs_from_sample_to_sample() -> None:
    images, _ = load(classes=1, noise=0.5).train.fetch(np.arange(50))
    assert len(images.unique(dim=0)) == 50
    spread = images - images.mean(0)
    assert 0.25 < spread.std() < 0.31  # uniform in +-0.5: 0.289


def test_validation_samples_are_others() -> None:
    splits = load(samples=100)
    assert splits.validation is not None
    train = splits.train.fetch(np.arange(80))[0].flatten(1)
    held = splits.validation.fetch(np.arange(20))[0].flatten(1)
    assert len(torch.cat([train, held]).unique(dim=0)) == 100


def test_a_billion_samples_cost_nothing() -> None:
    tracemalloc.start()
    began = time.perf_counter()
    splits = load(samples=10**9)
    images, _ = splits.train.fetch(np.array([0, 799_999_999]))
    splits.train.fingerprint()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(splits.train) == 800_000_000
    assert not torch.equal(images[0], images[1])
    assert peak < 10_000_000
    assert time.perf_counter() - began < 2


@pytest.mark.parametrize("change", [{"samples": 999}, {"classes": 9}, {"noise": 0.4}, {"shape": [3, 32, 16]}])
def test_fingerprint_tells_changes(change: dict[str, object]) -> None:
    assert load().train.fingerprint() == load().train.fingerprint()
    assert load().train.fingerprint() != load(**change).train.fingerprint()


@pytest.mark.parametrize(
    "wrong", [{"samples": 0}, {"classes": 0}, {"noise": -1}, {"noise": float("inf")}, {"shape": []}, {"shape": [3, 0]}]
)
def test_impossible_arguments(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=rf"data\.args\.{next(iter(wrong))}="):
        load(**wrong)


def test_a_fraction_that_leaves_nothing() -> None:
    with pytest.raises(DataError, match="validation_fraction"):
        load(samples=2)


LABELS = [0, 9, 6, 1, 4, 4, 3, 4, 7, 6, 4, 5]
PIXELS = [0.3941178, -0.4921569, 0.6882354, 0.3078432, 0.8058824]
