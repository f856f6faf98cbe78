"""Several threads put the same bytes in the same place as one, and an error of any of them is told after all ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from distributed_training.data.base import LooseRows, StoredRows
from distributed_training.feed import gathering
from distributed_training.feed.gathering import Helpers
from distributed_training.feed.rows import Loose, Rows, loose_of, rows_of
from distributed_training.runtime.errors import DataError

DATA = torch.arange(500 * 700, dtype=torch.int32).view(500, 700)
IDS = np.random.default_rng(0).permutation(500)


def stored(ids: np.ndarray = IDS) -> Rows:
    rows = rows_of(StoredRows(DATA, ids))
    assert rows is not None
    return rows


def loose(samples: list[torch.Tensor]) -> Loose:
    rows = loose_of(LooseRows(samples))
    assert rows is not None
    return rows


@pytest.fixture(params=[1, 2, 4, 16], ids="{} cores".format)
def helpers(request: pytest.FixtureRequest) -> Iterator[Helpers]:
    made = Helpers(request.param)
    yield made
    made.close()


def test_the_same_bytes_as_by_one_thread(helpers: Helpers) -> None:
    samples = [DATA[sample] for sample in IDS.tolist()]
    for _ in range(20):
        for buffer in (stored(), loose(samples)):
            memory = np.zeros(len(buffer), np.uint8)
            helpers.gather(buffer, memory)
            assert torch.equal(torch.from_numpy(memory).view(torch.int32).view(500, 700), DATA[IDS])


def test_no_more_threads_than_cores_and_none_before_they_are_needed() -> None:
    def running() -> int:
        return sum(thread.name.startswith("gather") for thread in threading.enumerate())

    before, helpers = running(), Helpers(3)
    helpers.gather(stored(IDS[:10]), np.zeros(28_000, np.uint8))
    assert running() == before, "28 KB are not worth it"
    helpers.gather(stored(), np.zeros(1_400_000, np.uint8))
    assert before < running() <= before + 2, "a quick one may take both parts"
    helpers.close()
    end = time.monotonic() + 30
    while running() > before:
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("bad", [0, 499], ids=["of the asking thread", "of another thread"])
def test_an_error_is_told_and_what_follows_is_right(monkeypatch: pytest.MonkeyPatch, bad: int) -> None:
    monkeypatch.setattr(gathering, "_LARGE", 1)
    samples = [DATA[sample] for sample in IDS.tolist()]
    helpers, memory = Helpers(4), np.zeros(1_400_000, np.uint8)
    for _ in range(3):
        unlike = list(samples)
        unlike[bad] = torch.zeros(699, dtype=torch.int32)
        buffer = Loose(unlike, torch.Size([700]), 2800)
        with pytest.raises(DataError):
            helpers.gather(buffer, memory)
        helpers.gather(stored(), memory)
        assert torch.equal(torch.from_numpy(memory).view(torch.int32).view(500, 700), DATA[IDS])
    helpers.close()
