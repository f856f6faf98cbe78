"""Crop, flip and normalise whole batches of images on the device, each sample's chance keyed by (seed, epoch, id)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from distributed_training.config import AugmentConfig
from distributed_training.data.plan import derive_key, hash_ids
from distributed_training.runtime.errors import DataError

# Each use of randomness has a number of its own, so that a sample's crop says nothing about its flip.
_CROP, _FLIP = 1, 2
IMAGE_KEYS = ("pixel_values", "images", "image", "inputs", "x")
"""What the images of a batch are called in a dict."""


class ImageTransform:
    """What happens to images after they reached the device: uint8 to [0, 1], then augmentation, then normalising."""

    def __init__(self, config: AugmentConfig, seed: int) -> None:
        self._config, self._seed = config, seed
        self._plain = config == AugmentConfig()  # nothing to do but to scale uint8: most batches pass untouched
        self.draws = bool(config.crop or config.flip)
        """Whether a sample's number and the epoch have a say in what becomes of it."""
        self._statistics: tuple[Tensor, Tensor] | None = None

    def __call__(self, data: Any, ids: np.ndarray, epoch: int, *, training: bool) -> Any:
        """`data` with its images transformed; random parts only in training."""
        if isinstance(data, Tensor):
            return self._images(data, ids, epoch, training)
        if isinstance(data, (tuple, list)) and data:
            if self._plain and getattr(data[0], "dtype", None) is not torch.uint8:
                return data
            values = [self._images(data[0], ids, epoch, training), *data[1:]]
            return type(data)(*values) if hasattr(data, "_fields") else type(data)(values)
        if isinstance(data, Mapping):
            key = next((k for k in IMAGE_KEYS if k in data), None)
            if key is not None:
                return {**data, key: self._images(data[key], ids, epoch, training)}
        return data

    def _images(self, images: Any, ids: np.ndarray, epoch: int, training: bool) -> Any:
        if not isinstance(images, Tensor) or images.ndim != 4:
            return images
        if images.dtype == torch.uint8:
            images = images.float().div_(255)
        if training and self._config.crop:
            bits = hash_ids(derive_key(self._seed, epoch, _CROP), ids)
            images = crop(images, self._config.crop, bits)
        if training and self._config.flip:
            bits = hash_ids(derive_key(self._seed, epoch, _FLIP), ids)
            images = flip(images, bits >> np.uint64(63) == 1)
        if self._config.mean is not None or self._config.std is not None:
            images = self._normalise(images)
        return images

    def _normalise(self, images: Tensor) -> Tensor:
        channels, known = images.shape[1], self._statistics
        if known is None or known[0].device != images.device or len(known[0]) != channels:
            known = self._statistics = (
                _per_channel(self._config.mean or [0.0], channels, "mean").to(images.device),
                _per_channel(self._config.std or [1.0], channels, "std").to(images.device),
            )
        mean, std = known
        return (images - mean) / std


def crop(images: Tensor, padding: int, bits: np.ndarray) -> Tensor:
    """Pad with zeros and cut each image back to its size at the place its random bits choose."""
    n, channels, height, width = images.shape
    places = np.uint64(2 * padding + 1)
    top = torch.from_numpy((bits >> np.uint64(32)) % places).long().to(images.device, non_blocking=True)
    left = torch.from_numpy((bits & np.uint64(0xFFFFFFFF)) % places).long().to(images.device, non_blocking=True)
    rows = top[:, None] + torch.arange(height, device=images.device)
    columns = left[:, None] + torch.arange(width, device=images.device)
    padded = F.pad(images, (padding,) * 4)
    sample = torch.arange(n, device=images.device)[:, None, None, None]
    channel = torch.arange(channels, device=images.device)[:, None, None]
    return padded[sample, channel, rows[:, None, :, None], columns[:, None, None, :]]


def flip(images: Tensor, chosen: np.ndarray) -> Tensor:
    """Mirror the chosen images left to right."""
    mask = torch.from_numpy(chosen).to(images.device, non_blocking=True)
    return torch.where(mask[:, None, None, None], images.flip(-1), images)


def _per_channel(values: list[float], channels: int, name: str) -> Tensor:
    if len(values) not in (1, channels):
        raise DataError(f"data.augment.{name} has {len(values)} values, but the images have {channels} channels")
    return torch.tensor(values).expand(channels)[:, None, None].clone()
