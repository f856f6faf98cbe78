"""Holding out a validation part: always the same samples, whatever the seed of the training."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from distributed_training.data.base import Dataset, KeyedDataset, Splits
from distributed_training.data.torch_dataset import drew_something, fetch, repeats
from distributed_training.runtime.errors import DataError

if TYPE_CHECKING:
    from distributed_training.data.placing import Memory


class Subset(KeyedDataset):
    """Some samples of another dataset, renumbered from 0. Nothing is copied but the ids."""

    def __init__(self, dataset: Dataset, ids: np.ndarray) -> None:
        self.dataset = dataset
        self.ids = np.ascontiguousarray(ids, dtype=np.int64)
        self.num_classes = dataset.num_classes
        self.classes = dataset.classes
        self.input_shape = dataset.input_shape

    @property
    def sample_bytes(self) -> int | None:  # type: ignore[override]
        return self.dataset.sample_bytes

    @property
    def sample_seconds(self) -> float:  # type: ignore[override]
        return self.dataset.sample_seconds

    @property
    def alone(self) -> bool:  # type: ignore[override]
        return self.dataset.alone

    @property
    def drew(self) -> bool:  # type: ignore[override]
        return drew_something(self.dataset)

    def __len__(self) -> int:
        return len(self.ids)

    def fetch_keyed(self, ids: np.ndarray, key: int) -> Any:
        return fetch(self.dataset, self.ids[ids], key)

    def fetch_steps(self, ids: np.ndarray, key: int, sizes: Sequence[int], memory: Memory) -> Any:
        return self.dataset.fetch_steps(self.ids[ids], key, sizes, memory)

    def fetch_loose(self, ids: np.ndarray, key: int) -> Any:
        return self.dataset.fetch_loose(self.ids[ids], key)

    def repeats(self, ids: np.ndarray) -> bool:
        return repeats(self.dataset, self.ids[ids])

    def rows(self, ids: np.ndarray) -> Any:
        return self.dataset.rows(self.ids[ids])

    def fingerprint(self) -> str:
        digest = hashlib.sha256(self.dataset.fingerprint().encode())
        digest.update(self.ids.astype("<i8", copy=False).tobytes())
        return digest.hexdigest()[:16]


def hold_out(dataset: Dataset, fraction: float, seed: int = 0) -> Splits:
    """Keep a fixed pseudo-random `fraction` of the samples for validation; 0 keeps none.

    The samples whose hashed ids are smallest are held out. Both parts stay in the order of the dataset, which reads
    memory-mapped and on-disk data forwards.
    """
    count = held_out_count(len(dataset), fraction)
    if count == 0:
        return Splits(dataset)
    hashes = mix64(np.arange(len(dataset), dtype=np.uint64), seed)
    held = np.zeros(len(dataset), dtype=bool)
    held[np.argpartition(hashes, count)[:count]] = True  # mix64 is a bijection: no ties, so the set is unique
    return Splits(Subset(dataset, np.flatnonzero(~held)), Subset(dataset, np.flatnonzero(held)))


def held_out_count(length: int, fraction: float) -> int:
    """How many of `length` samples are held out; refuses a fraction that leaves either part empty."""
    if fraction == 0:
        return 0
    count = round(length * fraction)
    if not 0 < count < length:
        part = "training" if count else "validation"
        raise DataError(
            f"data.validation_fraction={fraction} of {length} samples leaves none for {part}; "
            "change it, or set it to 0 to train without validation"
        )
    return count


def mix64(values: np.ndarray, seed: int = 0) -> np.ndarray:
    """Well-mixed uint64 for each uint64: the splitmix64 finaliser. Ours, so that it is the same for every NumPy."""
    mixed = values + _GOLDEN * (np.array([seed], dtype=np.uint64) + _ONE)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


# Arrays, not scalars: NumPy warns when a scalar multiplication wraps around, which is what a hash wants.
_GOLDEN = np.array([0x9E3779B97F4A7C15], dtype=np.uint64)
_ONE = np.array([1], dtype=np.uint64)
