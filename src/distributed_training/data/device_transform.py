"""Work on whole batches where the model is: a function of the user's, run on the device, its chance keyed by sample.

Samples travel as they are stored, as uint8 or as encoded bytes, and become what the model wants only here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distributed_training.data.nested import to_device
from distributed_training.data.plan import derive_key, hash_ids
from distributed_training.runtime.errors import DataError

Transform = Callable[..., Any]
"""`function(batch) -> batch`; it may also take any of `ids`, `epoch`, `training` and `rng` by name."""

_DRAWS = 3  # beside the crop and the flip of `augment`


class BatchRandom:
    """Random numbers for each sample of a batch: those of a sample are the same in whatever batch or rank it is.

    They are a function of (seed, epoch, sample, how many were drawn before). Each call gives one number a sample.
    """

    def __init__(self, seed: int, epoch: int, ids: np.ndarray, device: torch.device) -> None:
        self._seed, self._epoch, self._ids, self._device = seed, epoch, ids, device
        self._draws = 0

    def bits(self) -> np.ndarray:
        """64 random bits a sample, as uint64, on the CPU."""
        key = derive_key(self._seed, self._epoch, _DRAWS, self._draws)
        self._draws += 1
        return hash_ids(key, self._ids)

    def uniform(self, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Numbers in [low, high), float32, on the device."""
        unit = (self.bits() >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
        return low + (high - low) * self._there(unit)

    def integers(self, low: int, high: int) -> Tensor:
        """Whole numbers in [low, high), int64, on the device."""
        if not 0 < high - low < 2**32:
            raise ValueError(f"integers({low}, {high}): there must be between 1 and 2^32 - 1 to choose from")
        chosen = ((self.bits() >> np.uint64(32)) * np.uint64(high - low)) >> np.uint64(32)
        return low + self._there(chosen.astype(np.int64))

    def _there(self, numbers: np.ndarray) -> Tensor:
        return torch.from_numpy(numbers).to(self._device, non_blocking=True)


class DeviceTransform:
    """Functions applied to each batch, one after the other, on the device and without gradients."""

    def __init__(self, functions: Sequence[Transform], seed: int, device: torch.device) -> None:
        self._functions = [(function, _wanted(function)) for function in functions]
        self._seed, self._device = seed, device

    def __call__(self, data: Any, ids: np.ndarray, epoch: int, *, training: bool) -> Any:
        """The transformed batch, all of it on the device."""
        known = {"ids": ids, "epoch": epoch, "training": training}
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            for function, wanted in self._functions:
                given: dict[str, Any] = {name: known[name] for name in wanted if name != "rng"}
                if "rng" in wanted:
                    given["rng"] = BatchRandom(self._seed, epoch, ids, self._device)
                data = function(data, **given)
                if data is None:
                    raise DataError(f"device_transform {_name(function)} returned None; it must return the batch")
        return to_device(data, self._device)


def _wanted(function: Transform) -> list[str]:
    """Which of the things that we can tell it a function takes."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # builtins have no signature
        return []
    return [name for name in ("ids", "epoch", "training", "rng") if name in parameters]


def _name(function: Transform) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))
