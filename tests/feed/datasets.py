"""Datasets that both sides of a test make from a name."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from distributed_training.data import ArrayDataset, Dataset, Plan, as_dataset


def make_dataset(name: str) -> Dataset:
    """A dataset by name, the same in every process."""
    return _MAKERS[name]()


def make_plan(dataset: Dataset, batch_size: int = 16, seed: int = 3) -> Plan:
    """A shuffled plan with an uneven last batch for most datasets here."""
    return Plan(len(dataset), batch_size, seed)


def _arrays(samples: int = 1000, width: int = 20) -> Dataset:
    numbers = np.random.default_rng(0)
    inputs = numbers.standard_normal((samples, width)).astype(np.float32)
    return ArrayDataset((inputs, numbers.integers(0, 10, samples)), num_classes=10, name="test arrays")


class _Samples:
    """One sample at a time, with a random part and several kinds of values."""

    def __init__(self, samples: int = 200, seconds: float = 0.0, bad: tuple[int, ...] = ()) -> None:
        self.samples, self.seconds, self.bad = samples, seconds, bad

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in self.bad:
            raise ValueError(f"the file of {index} is damaged")
        time.sleep(self.seconds)
        return {
            "image": torch.full((3, 4, 4), index, dtype=torch.uint8),
            "noise": torch.rand(5),
            "half": torch.tensor([index], dtype=torch.bfloat16),
            "label": index % 7,
            "name": f"sample {index}",
            "place": np.full(3, index, np.int16),
        }


class _Encoded:
    """Samples of several lengths that are no tensors, as encoded images are."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": bytes([index]) * (70 + index), "label": index % 7, "name": f"sample {index}"}


class _Views:
    """Samples that are views of rows of tensors and arrays: nothing random, nothing but numbers."""

    def __init__(self, samples: int = 600, width: int = 3000) -> None:
        self.rows = torch.randn(samples, width, generator=torch.Generator().manual_seed(1))
        self.more = self.rows[:, :6].reshape(-1, 2, 3).to(torch.bfloat16)
        self.arrays = self.rows[:, :7].double().numpy()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return self.rows[index], self.more[index].T, self.arrays[index], float(index), index % 7, np.int32(index)


class _Loaded:
    """The rows of arrays, one by one."""

    def __init__(self, samples: int = 6000, width: int = 100) -> None:
        numbers = np.random.default_rng(0)
        self.rows = torch.from_numpy(numbers.standard_normal((samples, width)).astype(np.float32))
        self.labels = numbers.integers(0, 10, samples).tolist()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.rows[index], self.labels[index]


class UsesMemoryAgain:
    """Samples that lie in memory for so many, which is used again for later ones: good for one batch."""

    def __init__(self, samples: int = 600, room: int = 16, width: int = 300) -> None:
        self.samples, self.asked = samples, 0
        self.rows, self.array = torch.empty(room, width), np.empty((room, 5), np.int64)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        at, self.asked = self.asked % len(self.rows), self.asked + 1
        self.rows[at], self.array[at] = float(index), -index
        return self.rows[at], index, self.array[at]


class _Stepwise:
    """Samples whose length depends on the step of the first epoch that they are in."""

    def __init__(self) -> None:
        plan = Plan(400, 16, 3)
        self.steps = {sample: step for step in range(plan.steps_per_epoch) for sample in plan.ids(0, step).tolist()}

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((1000 + self.steps[index] // 12,), index, dtype=torch.float32), index


_MAKERS: dict[str, Any] = {
    "arrays": _arrays,
    "plain": lambda: ArrayDataset(np.repeat(np.arange(64, dtype=np.float32), 5000).reshape(64, 5000), name="plain"),
    "other arrays": lambda: _arrays(width=21),
    "many": lambda: _arrays(samples=12_000, width=100),
    "wide": lambda: _arrays(samples=3000, width=800),
    "large": lambda: _arrays(samples=512, width=16 << 10),
    "samples": lambda: as_dataset(_Samples()),
    "views": lambda: as_dataset(_Views()),
    "long views": lambda: as_dataset(_Views(width=30_000)),
    "stepwise": lambda: as_dataset(_Stepwise()),
    "loaded": lambda: as_dataset(_Loaded()),
    "used again": lambda: as_dataset(UsesMemoryAgain()),
    "slow": lambda: as_dataset(_Samples(seconds=0.002)),
    "encoded": lambda: as_dataset(_Encoded()),
    "bad": lambda: as_dataset(_Samples(bad=(37,))),
}
