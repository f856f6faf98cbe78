"""Images computed from their ids: any number of them, no files, and a model can learn them.

Every class has a pattern of up to 64 blocks of equal value; a sample is the pattern of its class plus uniform noise.
Labels, patterns and noise are hashes of ids, so any machine computes the same sample and nothing is kept in memory.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from distributed_training.config.check import at_least
from distributed_training.config.schema import DataConfig
from distributed_training.data.base import Dataset, Splits
from distributed_training.data.sources.arguments import read_arguments
from distributed_training.data.sources.split import held_out_count, mix64
from distributed_training.runtime.errors import ConfigError

BLOCKS = 64
LABEL, PATTERN, NOISE = 1, 2, 3
"""Seeds of the three hashes, so that they are independent of each other."""


@dataclass(kw_only=True)
class SyntheticArguments:
    """`data.args` of synthetic."""

    samples: int = 1000
    """Number of samples, training and validation together."""
    shape: list[int] = field(default_factory=lambda: [3, 32, 32])
    """Shape of one sample."""
    classes: int = 10
    """Number of classes."""
    noise: float = 0.5
    """Largest noise added to a pixel; patterns lie in -1..1."""


class SyntheticImages(Dataset):
    """The samples `start` to `start + length` of an endless row of images made from their ids."""

    alone = True

    def __init__(self, start: int, length: int, shape: tuple[int, ...], classes: int, noise: float) -> None:
        self.start, self.length, self.shape, self.num_classes, self.noise = start, length, shape, classes, noise

    def __len__(self) -> int:
        return self.length

    def fetch(self, ids: np.ndarray) -> Any:
        samples = (np.asarray(ids, dtype=np.int64) + self.start).astype(np.uint64)
        labels = (mix64(samples, LABEL) % np.uint64(self.num_classes or 1)).astype(np.int64)
        pixels = math.prod(self.shape)
        images = _bytes(samples, pixels, NOISE).astype(np.float32)
        images *= self.noise / 127.5
        images -= self.noise
        blocks = min(BLOCKS, pixels)
        patterns = _bytes(labels.astype(np.uint64), blocks, PATTERN).astype(np.float32) / 127.5 - 1
        images += patterns[:, np.arange(pixels) * blocks // pixels]
        return torch.from_numpy(images.reshape(len(ids), *self.shape)), torch.from_numpy(labels)

    def fingerprint(self) -> str:
        words = (self.start, self.length, self.shape, self.num_classes, self.noise)
        return hashlib.sha256(f"synthetic 1 {words}".encode()).hexdigest()[:16]


def load(config: DataConfig) -> Splits:
    """Float32 images of the given shape and labels 0..classes-1. The last ids are those held out."""
    arguments = read_arguments(SyntheticArguments, config)
    at_least("data.args.samples", arguments.samples, 1)
    at_least("data.args.classes", arguments.classes, 1)
    at_least("data.args.noise", arguments.noise, 0)
    if not math.isfinite(arguments.noise):
        raise ConfigError(f"data.args.noise={arguments.noise!r} must be finite")
    if not arguments.shape or min(arguments.shape) < 1:
        raise ConfigError(f"data.args.shape={arguments.shape!r} must be a list of sizes of at least 1")
    held = held_out_count(arguments.samples, config.validation_fraction)
    kept = arguments.samples - held
    common = (tuple(arguments.shape), arguments.classes, arguments.noise)
    # Samples are independent hashes: a range of ids is as random a part as any, and needs no list of a billion ids.
    train = SyntheticImages(0, kept, *common)
    return Splits(train, SyntheticImages(kept, held, *common) if held else None)


def _bytes(keys: np.ndarray, count: int, seed: int) -> np.ndarray:
    """uint8 [len(keys), count] hashed from the keys: eight from each 64-bit hash, which is what makes it fast."""
    words = -(-count // 8)
    counters = mix64(keys, seed)[:, None] + np.arange(words, dtype=np.uint64)
    return mix64(counters, seed).astype("<u8", copy=False).view(np.uint8).reshape(len(keys), words * 8)[:, :count]
