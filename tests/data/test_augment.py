"""Image augmentation in whole batches: what a plain loop per sample does, whatever the batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from distributed_training.config import AugmentConfig
from distributed_training.data.augment import ImageTransform, crop, flip
from distributed_training.data.plan import derive_key, hash_ids
from distributed_training.runtime.errors import DataError


class Pair(NamedTuple):
    images: Tensor
    targets: Tensor


def images(count: int = 12, channels: int = 3, height: int = 6, width: int = 5) -> Tensor:
    return torch.rand(count, channels, height, width, generator=torch.Generator().manual_seed(1))


def crop_one(image: Tensor, padding: int, top: int, left: int) -> Tensor:
    """The plain reference: zeros around, then a window."""
    channels, height, width = image.shape
    padded = torch.zeros(channels, height + 2 * padding, width + 2 * padding)
    padded[:, padding : padding + height, padding : padding + width] = image
    return padded[:, top : top + height, left : left + width]


def one_by_one(batch: Tensor, ids: np.ndarray, epoch: int, *, padding: int, mirrored: bool, seed: int) -> Tensor:
    rows = []
    for image, sample in zip(batch, ids):
        if padding:
            bits = int(hash_ids(derive_key(seed, epoch, 1), np.array([sample]))[0])
            places = 2 * padding + 1
            image = crop_one(image, padding, (bits >> 32) % places, (bits & 0xFFFFFFFF) % places)
        if mirrored and int(hash_ids(derive_key(seed, epoch, 2), np.array([sample]))[0]) >> 63:
            image = image.flip(-1)
        rows.append(image)
    return torch.stack(rows)


IDS = np.array([5, 0, 7, 99, 2**40, 3, 4, 8, 11, 12, 13, 1])


class TestAgainstPlainLoops:
    @pytest.mark.parametrize("padding", [1, 2, 4])
    def test_crop_is_a_window_of_the_padded_image(self, padding: int) -> None:
        batch = images()
        bits = hash_ids(9, IDS)
        rows = crop(batch, padding, bits)
        for row, image, random in zip(rows, batch, bits.tolist()):
            top, left = (random >> 32) % (2 * padding + 1), (random & 0xFFFFFFFF) % (2 * padding + 1)
            assert torch.equal(row, crop_one(image, padding, top, left))

    def test_flip_mirrors_the_chosen_images_only(self) -> None:
        batch = images(3)
        rows = flip(batch, np.array([True, False, True]))
        assert torch.equal(rows[0], batch[0].flip(-1))
        assert torch.equal(rows[1], batch[1])
        assert torch.equal(rows[2], batch[2].flip(-1))

    @pytest.mark.parametrize(("padding", "mirrored"), [(2, False), (0, True), (3, True)])
    @pytest.mark.parametrize("epoch", [0, 5])
    def test_a_batch_is_what_each_sample_is_alone(self, padding: int, mirrored: bool, epoch: int) -> None:
        transform = ImageTransform(AugmentConfig(crop=padding, flip=mirrored), seed=4)
        expected = one_by_one(images(), IDS, epoch, padding=padding, mirrored=mirrored, seed=4)
        assert torch.equal(transform(images(), IDS, epoch, training=True), expected)

    def test_one_channel_and_one_image_work(self) -> None:
        transform = ImageTransform(AugmentConfig(crop=2, flip=True), seed=0)
        assert transform(images(1, 1), IDS[:1], 0, training=True).shape == (1, 1, 6, 5)
        assert transform(images(0), IDS[:0], 0, training=True).shape == (0, 3, 6, 5)


class TestRandomness:
    def transform(self, batch: Tensor, ids: np.ndarray, epoch: int = 0, seed: int = 0, training: bool = True) -> Tensor:
        return ImageTransform(AugmentConfig(crop=2, flip=True), seed)(batch, ids, epoch, training=training)

    def test_does_not_depend_on_the_batch(self) -> None:
        whole = self.transform(images(), IDS)
        some = [7, 2, 3]
        assert torch.equal(self.transform(images()[some], IDS[some]), whole[some])

    def test_differs_by_epoch_and_seed(self) -> None:
        first = self.transform(images(), IDS)
        assert not torch.equal(first, self.transform(images(), IDS, epoch=1))
        assert not torch.equal(first, self.transform(images(), IDS, seed=1))
        assert torch.equal(first, self.transform(images(), IDS))

    def test_is_left_out_when_not_training(self) -> None:
        assert torch.equal(self.transform(images(), IDS, training=False), images())

    def test_the_given_images_are_not_changed(self) -> None:
        batch = images()
        self.transform(batch, IDS)
        assert torch.equal(batch, images())

    def test_uses_no_global_generator(self) -> None:
        before = torch.get_rng_state()
        self.transform(images(), IDS)
        assert torch.equal(before, torch.get_rng_state())

    def test_half_of_the_images_are_mirrored_and_every_window_occurs(self) -> None:
        count, ids = 5000, np.arange(5000)
        marked = torch.zeros(count, 1, 5, 5)
        marked[:, :, 2, 2] = 1
        where = ImageTransform(AugmentConfig(crop=2), 0)(marked, ids, 0, training=True).flatten(1)
        assert where.sum(1).eq(1).all()
        share = where.mean(0)
        assert share.min() > 0.025  # of 25 windows, each about 0.04
        assert share.max() < 0.055
        left = torch.zeros(count, 1, 1, 2)
        left[..., 0] = 1
        mirrored = ImageTransform(AugmentConfig(flip=True), 0)(left, ids, 0, training=True)[:, 0, 0, 1]
        assert 0.46 < mirrored.mean() < 0.54

    def test_the_crop_of_a_sample_says_nothing_about_its_flip(self) -> None:
        ids = np.arange(5000)
        top = hash_ids(derive_key(0, 0, 1), ids) >> np.uint64(63)
        flips = hash_ids(derive_key(0, 0, 2), ids) >> np.uint64(63)
        assert 0.46 < (top == flips).mean() < 0.54


class TestScaling:
    def test_bytes_become_fractions(self) -> None:
        batch = torch.tensor([0, 51, 255, 102], dtype=torch.uint8).reshape(1, 1, 2, 2)
        scaled = ImageTransform(AugmentConfig(), 0)(batch, IDS[:1], 0, training=False)
        assert scaled.dtype == torch.float32
        assert torch.allclose(scaled.flatten(), torch.tensor([0, 0.2, 1, 0.4]))
        assert batch.dtype == torch.uint8

    @pytest.mark.parametrize("training", [True, False])
    def test_mean_and_deviation_are_by_channel(self, training: bool) -> None:
        transform = ImageTransform(AugmentConfig(mean=[0.1, 0.2, 0.3], std=[1.0, 2.0, 4.0]), 0)
        for _ in range(2):
            result = transform(images(), IDS, 0, training=training)
            for channel, (mean, std) in enumerate([(0.1, 1), (0.2, 2), (0.3, 4)]):
                assert torch.allclose(result[:, channel], (images()[:, channel] - mean) / std)

    def test_one_value_serves_all_channels(self) -> None:
        result = ImageTransform(AugmentConfig(mean=[0.5], std=[0.25]), 0)(images(), IDS, 0, training=False)
        assert torch.allclose(result, (images() - 0.5) / 0.25)

    def test_mean_or_deviation_may_be_left_out(self) -> None:
        only_mean = ImageTransform(AugmentConfig(mean=[0.5]), 0)(images(), IDS, 0, training=False)
        only_std = ImageTransform(AugmentConfig(std=[0.5]), 0)(images(), IDS, 0, training=False)
        assert torch.allclose(only_mean, images() - 0.5)
        assert torch.allclose(only_std, images() * 2)

    @pytest.mark.parametrize("name", ["mean", "std"])
    def test_values_for_another_number_of_channels_are_refused(self, name: str) -> None:
        transform = ImageTransform(AugmentConfig(**{name: [0.1, 0.2, 0.3]}), 0)
        with pytest.raises(DataError, match=f"data.augment.{name} has 3 values, but the images have 1 channels"):
            transform(images(channels=1), IDS, 0, training=True)

    def test_they_are_refused_also_after_images_that_fit(self) -> None:
        transform = ImageTransform(AugmentConfig(mean=[0.1, 0.2, 0.3]), 0)
        transform(images(), IDS, 0, training=True)
        with pytest.raises(DataError, match="3 values, but the images have 1 channels"):
            transform(images(channels=1), IDS, 0, training=True)

    def test_normalising_comes_after_padding(self) -> None:
        """Padding is black before normalising, so it is -mean/std after it."""
        transform = ImageTransform(AugmentConfig(crop=4, mean=[0.5]), 0)
        assert transform(torch.ones(12, 1, 4, 4), IDS, 0, training=True).unique().tolist() == [-0.5, 0.5]


class TestKindsOfBatches:
    @pytest.fixture(params=[AugmentConfig(), AugmentConfig(flip=True, mean=[0.5])], ids=["plain", "augmented"])
    def config(self, request: pytest.FixtureRequest) -> AugmentConfig:
        return request.param

    def expected(self, config: AugmentConfig) -> Tensor:
        return ImageTransform(config, 0)(self.bytes(), IDS, 0, training=True)

    def bytes(self) -> Tensor:
        return (images() * 255).to(torch.uint8)

    @pytest.mark.parametrize("kind", [tuple, list, Pair._make])
    def test_of_sequences_the_first_is_the_image(self, config: AugmentConfig, kind: Any) -> None:
        labels = torch.arange(12)
        batch = kind([self.bytes(), labels])
        result = ImageTransform(config, 0)(batch, IDS, 0, training=True)
        assert type(result) is type(batch)
        assert torch.equal(result[0], self.expected(config))
        assert result[1] is labels

    @pytest.mark.parametrize("key", ["pixel_values", "images", "image", "inputs", "x"])
    def test_of_mappings_the_usual_names_are_images(self, config: AugmentConfig, key: str) -> None:
        batch = {"labels": torch.arange(12), key: self.bytes()}
        result = ImageTransform(config, 0)(batch, IDS, 0, training=True)
        assert isinstance(result, Mapping)
        assert torch.equal(result[key], self.expected(config))
        assert result["labels"] is batch["labels"]
        assert batch[key].dtype == torch.uint8

    @pytest.mark.parametrize(
        "data",
        [
            {"input_ids": torch.ones(2, 4)},
            torch.ones(2, 4),
            (torch.ones(2, 4), torch.ones(2)),
            ("text", torch.ones(2)),
            (),
            None,
            3,
        ],
        ids=lambda data: type(data).__name__,
    )
    def test_what_holds_no_images_passes_unchanged(self, config: AugmentConfig, data: Any) -> None:
        result = ImageTransform(config, 0)(data, IDS[:2], 0, training=True)
        assert type(result) is type(data)
        if isinstance(data, Tensor):
            assert result is data
        elif isinstance(data, dict):
            assert result["input_ids"] is data["input_ids"]
        elif isinstance(data, tuple):
            assert all(a is b for a, b in zip(result, data, strict=True))
        else:
            assert result == data

    def test_bytes_that_are_no_images_pass_unchanged(self, config: AugmentConfig) -> None:
        data = (torch.ones(2, 4, dtype=torch.uint8), torch.ones(2))
        assert ImageTransform(config, 0)(data, IDS[:2], 0, training=True)[0] is data[0]
