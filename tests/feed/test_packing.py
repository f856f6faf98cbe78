"""Steps that were fetched together travel as runs, and are the same batches again when they are cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.contract.dataset import assert_equal
from tests.wire.pair import carry, opened

from distributed_training.data import ArrayDataset, Plan
from distributed_training.data.base import Share
from distributed_training.data.steps import read_blocks, read_steps
from distributed_training.feed.arrivals import Run
from distributed_training.feed.packing import RUN, pack
from distributed_training.feed.tensors import as_tensor
from distributed_training.wire import Batch
from distributed_training.wire.messages import Lease

SAMPLES, SIZE = 203, 8
X, Y = np.random.default_rng(0).random((SAMPLES, 3, 7), np.float32), np.arange(SAMPLES) % 5
DATA: dict[str, Any] = {
    "tuple": (X, Y),
    "dict": {"x": X, "mask": Y > 2},
    "one": torch.from_numpy(X).to(torch.bfloat16),
}


def received(dataset: ArrayDataset, plan: Plan, share: Share, gathered: bool, most: int) -> Iterator[tuple[int, Any]]:
    """(step, data) of an epoch, sent and received."""
    lease = Lease(1, 0, 0, plan.steps_per_epoch, share.rank, share.ranks, 1.0)
    server, worker = opened()
    for block in read_blocks(dataset, plan, share, 0, 0, plan.steps_per_epoch, gathered=gathered):
        packed = pack(lease, block, 0.5, most)
        assert sum(batch.steps for batch in packed) == len(block.steps)
        worker.send_batches(1, packed)
    for event in carry(server, worker)[0]:
        assert isinstance(event, Batch)
        data = event.data(as_tensor)
        rows = len(event.ids) // event.steps
        if event.steps == 1:
            yield event.step, data
            continue
        run, middle = Run(event.ids.reshape(event.steps, rows), data, rows, Share().batch), (event.steps + 1) // 2
        for step, batch in enumerate(run.cut(0, middle) + run.cut(middle, event.steps), event.step):
            assert batch.ids.tolist() == event.ids[(step - event.step) * rows :][:rows].tolist()
            yield step, batch.data


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize("share", [Share(), Share(1, 3)])
@pytest.mark.parametrize("run", [RUN, 2000])
def test_the_same_batches_arrive(kind: str, gathered: bool, share: Share, run: int) -> None:
    dataset, plan = ArrayDataset(DATA[kind]), Plan(SAMPLES, SIZE, 1)
    expected = list(read_steps(dataset, plan, share, 0, 0, plan.steps_per_epoch))
    found = list(received(dataset, plan, share, gathered, run))
    assert [step for step, _ in found] == [step for step, _ in expected]
    for (_, data), (_, batch) in zip(found, expected):
        assert_equal(data, batch.data)


def test_runs_are_of_steps_of_equal_size_and_about_as_long_as_wished() -> None:
    dataset, plan = ArrayDataset(DATA["tuple"]), Plan(SAMPLES, SIZE, 1)
    lease = Lease(1, 0, 0, 26, 0, 1, 1.0)
    (block,) = read_blocks(dataset, plan, Share(), 0, 0, 26)
    row = X[0].nbytes + 8 + 8  # inputs, target, id
    assert [(p.head[1], p.steps, p.samples) for p in pack(lease, block, 0.0)] == [(0, 25, 200), (25, 1, 3)]
    assert [p.steps for p in pack(lease, block, 0.0, 8 * SIZE * row)] == [8, 8, 8, 1, 1]
