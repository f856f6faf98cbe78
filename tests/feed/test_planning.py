"""The plan as a loader describes it is checked; ids are those of the plan."""

from __future__ import annotations

from typing import Any

import pytest

from distributed_training.data import Plan
from distributed_training.feed.planning import PlannedIds, facts_of, plan_from
from distributed_training.runtime.errors import DataError

PLAN = Plan(1003, 7, 5)


def test_a_plan_travels_as_facts() -> None:
    assert plan_from(facts_of(PLAN)) == PLAN


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
    ],
)
def test_facts_that_make_no_sense_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="the loader"):
        plan_from({**facts_of(PLAN), **change})


def test_ids_are_those_of_the_plan_in_any_order() -> None:
    ids = PlannedIds(PLAN)
    for epoch, step in [(0, 0), (0, 143), (3, 100), (1, 70), (0, 1), (2, 143)]:
        assert ids(epoch, step).tolist() == PLAN.ids(epoch, step).tolist()
