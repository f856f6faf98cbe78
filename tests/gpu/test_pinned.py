"""Batches put together in pinned memory: the same as elsewhere, and not overwritten while a copy reads them."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from tests.contract.dataset import assert_equal

from distributed_training.data import ArrayDataset, Loader, Plan, as_dataset
from distributed_training.data.base import Dataset
from distributed_training.data.nested import tensors_in, to_device


class Noisy:
    """Samples that draw."""

    def __len__(self) -> int:
        return 5003

    def __getitem__(self, at: int) -> tuple[torch.Tensor, int]:
        return torch.full((20,), float(at)) + torch.rand(20), at % 10


def arrays() -> Dataset:
    numbers = np.random.default_rng(0)
    return ArrayDataset((numbers.random((5003, 20), dtype=np.float32), numbers.integers(0, 10, 5003)))


KINDS = {"arrays": arrays, "samples": lambda: as_dataset(Noisy())}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [7, 64, 1024])
def test_pinned_batches_are_the_same(kind: str, size: int, workers: int) -> None:
    plan = Plan(5003, size, seed=2)
    plain = Loader(KINDS[kind](), plan, resident="off")
    with closing(Loader(KINDS[kind](), plan, num_workers=workers, pin_memory=True, resident="off")) as pinned:
        for epoch in range(2):
            for (step, one), (other_step, other) in zip(pinned.batches(epoch), plain.batches(epoch), strict=True):
                assert (step, one.ids.tolist()) == (other_step, other.ids.tolist())
                assert all(tensor.is_pinned() for tensor in tensors_in(one.data))
                assert_equal(one.data, other.data)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_not_overwritten_before_it_was_copied(kind: str) -> None:
    """The device is kept busy, so that copies wait while later batches are put together."""
    plan, device = Plan(5003, 64, seed=2), torch.device("cuda", 0)
    expected = [batch.data for epoch in range(2) for _, batch in Loader(KINDS[kind](), plan).batches(epoch)]
    loader, copied = Loader(KINDS[kind](), plan, pin_memory=True, resident="off"), []
    for epoch in range(2):
        for _, batch in loader.batches(epoch):
            if len(copied) % 40 == 0:
                torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]
            copied.append(to_device(batch.data, device))
    assert len(copied) == len(expected)
    for one, other in zip(copied, expected):
        assert_equal([tensor.cpu() for tensor in tensors_in(one)], list(tensors_in(other)))


def test_a_batch_that_is_kept_stays_as_it_is() -> None:
    plan = Plan(5003, 64, seed=2)
    kept: list[Any] = [b.data for _, b in Loader(arrays(), plan, pin_memory=True, resident="off").batches(0)]
    assert_equal(kept, [batch.data for _, batch in Loader(arrays(), plan).batches(0)])
