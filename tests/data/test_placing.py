"""Batches are put together in the memory that is asked for, and are the same there."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from tests.contract.dataset import assert_equal

from distributed_training.data import ArrayDataset, Plan, PreprocessedDataset, as_dataset
from distributed_training.data.base import Batch, Dataset, Share
from distributed_training.data.nested import tensors_in
from distributed_training.data.placing import Memory
from distributed_training.data.steps import read_steps
from distributed_training.runtime.errors import DataError


class Arena:
    """Memory of its own, so that it can be seen whether something lies in it. A page: what is on it is not reused."""

    def __init__(self) -> None:
        self.room = torch.zeros(2**22, dtype=torch.uint8)
        self.used = self.copies = 0
        self.memory = Memory(self.empty, self.copy, self.holds)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        start, self.used = self.used, self.used + -(-size // 64) * 64
        assert self.used <= len(self.room)
        return self.room[start : start + size].view(dtype).view(shape)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        self.copies += 1
        flat = self.empty((tensor.untyped_storage().nbytes() // tensor.itemsize,), tensor.dtype)
        own = flat.as_strided(tensor.size(), tensor.stride())
        return own.copy_(tensor)

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() == self.room.untyped_storage().data_ptr()


class Samples:
    """A user's samples: as `make` makes them."""

    def __init__(self, make: Any, count: int = 53) -> None:
        self.make, self.count = make, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, at: int) -> Any:
        return self.make(at)


def noisy(at: int) -> Any:
    return torch.full((3,), float(at)) + torch.rand(3) + float(np.random.rand()), at, random.random()


IMAGES = torch.arange(53 * 12, dtype=torch.float32).view(53, 2, 2, 3).permute(0, 3, 1, 2)
ARRAYS = (torch.arange(53 * 4, dtype=torch.float32).view(53, 2, 2), torch.arange(53))
DATASETS = {
    "a tuple of arrays": lambda: ArrayDataset(ARRAYS),
    "a dict of arrays": lambda: ArrayDataset({"x": ARRAYS[0].bfloat16(), "y": ARRAYS[1] > 9}),
    "one array": lambda: ArrayDataset(ARRAYS[1]),
    "an array with strides": lambda: ArrayDataset((IMAGES, ARRAYS[1])),
    "unsigned numbers": lambda: ArrayDataset(np.arange(53, dtype=np.uint16)),
    "samples that draw": lambda: as_dataset(Samples(noisy)),
    "samples in dicts": lambda: as_dataset(Samples(lambda at: {"x": np.full(2, at), "y": torch.tensor(at)})),
    "samples with strides": lambda: as_dataset(Samples(lambda at: (IMAGES[at], at))),
    "samples with a gradient": lambda: as_dataset(
        Samples(lambda at: (torch.full((2,), float(at), requires_grad=True),))
    ),
    "single tensors": lambda: as_dataset(Samples(lambda at: torch.tensor([at]))),
    "texts": lambda: as_dataset(Samples(lambda at: (torch.tensor([at]), str(at)))),
    "a function": lambda: PreprocessedDataset(ArrayDataset(ARRAYS), lambda row: (row[0] * 2 + torch.rand(()), row[1])),
}


def read(
    dataset: Dataset, memory: Memory | None, *, size: int, share: Share, first: int = 0
) -> list[tuple[int, Batch]]:
    plan = Plan(53, size, seed=3)
    return [
        one for epoch in (0, 1) for one in read_steps(dataset, plan, share, epoch, first, plan.steps_per_epoch, memory)
    ]


@pytest.mark.parametrize("share", [Share(), Share(1, 3)], ids=["whole", "a third"])
@pytest.mark.parametrize("size", [1, 4, 53])
@pytest.mark.parametrize("kind", DATASETS)
def test_batches_are_the_same_and_lie_where_they_should(kind: str, size: int, share: Share) -> None:
    arena = Arena()
    first = 2 if size == 4 else 0
    expected = read(DATASETS[kind](), None, size=size, share=share, first=first)
    found = read(DATASETS[kind](), arena.memory, size=size, share=share, first=first)
    assert [step for step, _ in found] == [step for step, _ in expected]
    for (_, one), (_, other) in zip(found, expected):
        assert one.ids.tolist() == other.ids.tolist()
        assert type(one.data) is type(other.data)
        assert_equal(one.data, other.data)
        for a, b in zip(tensors_in(one.data), tensors_in(other.data)):
            assert arena.holds(a)
            assert len(a) == 1 or a.stride() == b.stride(), "the layout of a batch may decide how it is computed with"


def test_rows_of_arrays_are_never_copied_once_more() -> None:
    arena = Arena()
    read(DATASETS["a tuple of arrays"](), arena.memory, size=8, share=Share())
    assert arena.used
    assert arena.copies == 0


def test_samples_are_copied_once_more_in_the_first_step_alone() -> None:
    """It has to be seen first what they are."""
    arena = Arena()
    read(as_dataset(Samples(lambda at: (torch.tensor([at]),))), arena.memory, size=8, share=Share())
    assert arena.copies == 1


def test_samples_that_do_not_fit_together_are_named_in_their_step() -> None:
    dataset = as_dataset(Samples(lambda at: (torch.zeros(1 + (at >= 42)), at)))
    steps = read_steps(dataset, Plan(53, 4, shuffle=False), Share(), 0, 0, 14, Arena().memory)
    assert [next(steps)[0] for _ in range(10)] == list(range(10))
    with pytest.raises(DataError, match=r"Samples: collating samples \[40, "):
        next(steps)


def test_samples_that_fit_within_each_step_are_put_together_step_by_step() -> None:
    dataset = as_dataset(Samples(lambda at: (torch.zeros(1 + at // 40), at)))
    steps = read_steps(dataset, Plan(53, 4, shuffle=False), Share(), 0, 0, 14, Arena().memory)
    assert [batch.data[0].shape[1] for _, batch in steps] == [1] * 10 + [2] * 4


def test_a_failing_sample_is_named() -> None:
    def fail(at: int) -> Any:
        return torch.zeros(2), 1 // (at != 41)

    steps = read_steps(as_dataset(Samples(fail)), Plan(53, 4, shuffle=False), Share(), 0, 0, 14, Arena().memory)
    with pytest.raises(DataError, match="Samples: sample 41: ZeroDivisionError"):
        list(steps)
