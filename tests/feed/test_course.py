"""What a loader has in an epoch: training, then validation, numbered on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from distributed_training.data import ArrayDataset, Plan, as_dataset
from distributed_training.data import steps as data_steps
from distributed_training.data.base import Share
from distributed_training.feed.course import Course, Part
from distributed_training.feed.planning import PlannedIds, plan_from
from distributed_training.runtime.errors import DataError

TRAIN, HELD_OUT = Plan(50, 8, 3), Plan(20, 8, 3, shuffle=False)


def course() -> Course:
    train = ArrayDataset((torch.arange(50), torch.zeros(50)), name="train")
    held_out = ArrayDataset((torch.arange(100, 120), torch.zeros(20)), name="held out")
    return Course(Part(train, TRAIN), Part(held_out, HELD_OUT), {"epochs": 2})


def test_the_facts_say_what_the_gpu_side_has_to_know() -> None:
    facts = course().all_facts()
    assert plan_from(facts) == course().plan
    assert facts["epochs"] == 2
    assert facts["validation_dataset"] == course().validation.dataset.fingerprint()  # type: ignore[union-attr]


@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize("share", [Share(), Share(1, 2)])
def test_a_lease_over_both_parts_has_the_samples_that_the_gpu_side_expects(gathered: bool, share: Share) -> None:
    ids, steps = PlannedIds(course().plan), []
    for piece in course().pieces(1, 4, 10):
        for block in piece.blocks(share, gathered=gathered):
            steps += range(block.first, block.first + len(block.steps))
            for step, own in zip(range(block.first, 100), block.own):
                planned = ids(1, step)
                assert own.tolist() == planned[share.rows(len(planned))].tolist()
            first = block.data[0] if gathered else block.data[0].tensor[block.data[0].ids]
            expected = np.concatenate(block.own) + (100 if block.first >= TRAIN.steps_per_epoch else 0)
            assert first.tolist() == expected.tolist()
    assert steps == [4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize(("run", "most"), [(1, 1), (3 * 4 * 416, 3), (1 << 20, 13)])
def test_samples_are_loaded_for_as_many_steps_as_a_run_has_bytes(
    monkeypatch: pytest.MonkeyPatch, run: int, most: int
) -> None:
    monkeypatch.setattr(data_steps, "_SECONDS_AT_ONCE", 60.0)  # however busy the machine is
    samples = [
        (torch.full((100,), float(number)), number) for number in range(50)
    ]  # 408 bytes each, and 8 for its number
    dataset = as_dataset(samples)
    dataset.fetch(np.arange(4))  # from now on it is known how large they are
    (piece,) = Course(Part(dataset, Plan(50, 4, 3))).pieces(0, 0, 13)

    blocks = list(piece.blocks(Share(), gathered=False, run=run))

    assert len(blocks[0].steps) == max(len(block.steps) for block in blocks) == most
    assert [step for block in blocks for step in range(block.first, block.first + len(block.steps))] == list(range(13))


def test_steps_that_there_are_not_are_refused() -> None:
    with pytest.raises(DataError, match="step 10 of epoch 0 is none of the 10 of this loader"):
        course().pieces(0, 0, 11)
    with pytest.raises(DataError, match="is none of the 7"):
        Course(course().train).pieces(0, 7, 8)
    with pytest.raises(DataError, match="the plan is for 50 samples"):
        Part(ArrayDataset(torch.zeros(49)), TRAIN)
