"""The plan as a loader describes it is checked; ids are those of the plan."""

from __future__ import annotations

from typing import Any

import pytest

from distributed_training.data import Plan
from distributed_training.feed.planning import EpochPlan, PlannedIds, facts_of, plan_from
from distributed_training.runtime.errors import DataError

TRAIN = Plan(1003, 7, 5)
PLAN = EpochPlan(TRAIN)
BOTH = EpochPlan(TRAIN, Plan(50, 7, 5, shuffle=False))


def test_a_plan_travels_as_facts() -> None:
    assert plan_from(facts_of(PLAN)) == PLAN
    assert plan_from(facts_of(BOTH)) == BOTH


@pytest.mark.parametrize(
    "change",
    [
        {"samples": 0},
        {"samples": 2**50},
        {"batch_size": 0},
        {"batch_size": 2000},
        {"seed": "5"},
        {"shuffle": 1},
        {"samples": True},
        {"validation_samples": 10},
        {"validation_samples": 10, "validation_batch_size": 11},
        {"validation_samples": "10", "validation_batch_size": 7},
    ],
)
def test_facts_that_make_no_sense_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="the loader"):
        plan_from({**facts_of(PLAN), **change})


def test_ids_are_those_of_the_plan_in_any_order() -> None:
    ids = PlannedIds(PLAN)
    for epoch, step in [(0, 0), (0, 143), (3, 100), (1, 70), (0, 1), (2, 143)]:
        assert ids(epoch, step).tolist() == TRAIN.ids(epoch, step).tolist()


def test_held_out_steps_follow_those_of_training_and_are_the_same_in_every_epoch() -> None:
    ids, first = PlannedIds(BOTH), TRAIN.steps_per_epoch
    assert BOTH.steps == first + 8
    for epoch in (0, 2):
        assert ids(epoch, first - 1).tolist() == TRAIN.ids(epoch, first - 1).tolist()
        assert [sample for step in range(first, BOTH.steps) for sample in ids(epoch, step)] == list(range(50))
