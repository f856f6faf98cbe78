"""Datasets say whether their samples are the same in every epoch, and only where that was seen."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from distributed_training.data import ArrayDataset, PreprocessedDataset, as_dataset
from distributed_training.data.base import KeyedDataset
from distributed_training.data.sources.split import hold_out
from distributed_training.data.torch_dataset import repeats

IDS = np.array([0, 19])


class Samples:
    """As many as there are, each with something added."""

    def __init__(self, extra: Any = lambda: 0.0) -> None:
        self.extra = extra

    def __len__(self) -> int:
        return 20

    def __getitem__(self, at: int) -> tuple[torch.Tensor, int]:
        return torch.full((1 + at % 2,), float(at)) + self.extra(), at % 3


class WholeBatches(Samples):
    def __getitems__(self, ids: list[int]) -> list[Any]:
        return [self[at] for at in ids]


def padded(rows: list[Any]) -> Any:
    return torch.nn.utils.rnn.pad_sequence([row[0] for row in rows], batch_first=True), torch.tensor(
        [r[1] for r in rows]
    )


def first_only(rows: list[Any]) -> Any:
    return torch.stack([row[0][:1] for row in rows]), torch.tensor([row[1] for row in rows])


@pytest.mark.parametrize("extra", [lambda: torch.rand(()), lambda: float(np.random.rand()), random.random])
def test_whatever_draws_does_not_repeat(extra: Any) -> None:
    before = (torch.get_rng_state(), random.getstate())
    assert not repeats(as_dataset(Samples(extra)), IDS)
    assert not repeats(as_dataset(WholeBatches(extra), first_only), IDS)
    assert not repeats(PreprocessedDataset(ArrayDataset(torch.zeros(20, 2)), lambda row: row + extra()), IDS)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()


def test_what_does_not_draw_repeats() -> None:
    plain = as_dataset(Samples(), first_only)
    assert repeats(ArrayDataset(torch.zeros(20, 2)), IDS)
    assert repeats(plain, IDS)
    assert repeats(as_dataset(WholeBatches(), first_only), IDS)
    assert repeats(hold_out(plain, 0.5).train, np.array([0, 9]))
    assert repeats(PreprocessedDataset(plain, lambda row: (row[0] * 2, row[1])), IDS)
    assert not repeats(PreprocessedDataset(plain, lambda row, rng: row), IDS)


def test_a_sample_that_depends_on_its_neighbours_does_not_repeat() -> None:
    assert not repeats(as_dataset(Samples(), padded), IDS)


def test_a_keyed_dataset_does_not_unless_it_says_so() -> None:
    class Keyed(KeyedDataset):
        def __len__(self) -> int:
            return 20

        def fetch_keyed(self, ids: np.ndarray, key: int) -> Any:
            return torch.from_numpy(ids)

        def fingerprint(self) -> str:
            return "x"

    assert not repeats(Keyed(), IDS)
