"""Differences are judged by a tolerance, and by what rounding does to this very training."""

from __future__ import annotations

import math

import pytest

from distributed_training.verify.compare import Record, first_other_batch, measure, rounding

FACTS = {"data": {}}


def record(*steps: dict[str, float], losses: tuple[float, ...] = (), ids: str = "") -> Record:
    """Differences by tensor for step 0, 1, ..."""
    lines = {}
    for step, apart in enumerate(steps):
        lines[step] = {"step": step, "weights": apart}
        if step:
            lines[step] |= {"loss": losses[step - 1] if losses else 2.0, "ids": ids[step - 1 : step] or "x"}
    return Record(FACTS, lines)


REFERENCE = record({}, {}, {}, {})
QUIET = rounding(record({"a": 1e-8, "b": 1e-8}, *[{"a": 1e-8, "b": 1e-8}] * 3), REFERENCE)


def test_the_first_step_past_tolerance_and_its_tensor() -> None:
    other = record({"a": 0, "b": 0}, {"a": 9e-7, "b": 0}, {"a": 2e-6, "b": 4e-6}, {"a": 9e-6, "b": 1e-6})
    found = measure(other, REFERENCE, 1e-6, QUIET)
    assert (found.first_step, found.where, found.found, found.allowed) == (2, "b", 4e-6, 1e-6)
    assert (found.weights, found.tensor) == (9e-6, "a")
    assert measure(other, REFERENCE, 1e-5, QUIET).first_step is None


def test_ten_times_what_rounding_does_is_allowed_from_there_on() -> None:
    noise = rounding(record({"a": 1e-8}, {"a": 1e-8, "b": 1e-8}, {"a": 2e-5, "b": 1e-8}, {"a": 1e-8}), REFERENCE)
    assert measure(record({}, {"a": 1e-7}, {"b": 1e-4}, {"b": 1e-4}), REFERENCE, 1e-6, noise).first_step is None
    assert measure(record({}, {"b": 1e-4}, {"b": 1e-4}), REFERENCE, 1e-6, noise).first_step == 1
    assert measure(record({}, {"a": 1e-7}, {"a": 3e-4}), REFERENCE, 1e-6, noise).first_step == 2
    other_losses = record({}, {}, {}, losses=(2.0, 2.00001))
    assert measure(other_losses, REFERENCE, 1e-6, noise).where == "loss"


def test_nothing_is_judged_where_rounding_has_taken_over() -> None:
    noise = rounding(record({"a": 1e-8}, {"a": 1e-6}, {"a": 1e-2}, {"a": 1e-5}), REFERENCE)
    assert sorted(noise) == [0, 1]
    found = measure(record({}, {"a": 1e-7}, {"a": 0.5}, {"a": 0.9}), REFERENCE, 1e-6, noise)
    assert (found.first_step, found.weights) == (None, 1e-7)


def test_the_first_step_is_always_judged() -> None:
    assert sorted(rounding(record({"a": 0.0}, {"a": 1.0}, {"a": 1.0}), REFERENCE)) == [0, 1]


def test_losses_are_relative_to_the_largest_so_far() -> None:
    small = (4.0, 1e-9, 1e-9)
    reference, other = record({}, {}, {}, {}, losses=small), record({}, {}, {}, {}, losses=(4.0, 3e-9, 1e-9))
    assert measure(other, reference, 1e-6, QUIET).loss == pytest.approx(5e-10)
    assert measure(record({}, {}, losses=(4.1,)), reference, 1e-6, QUIET).where == "loss"
    nan = record({}, {}, losses=(math.nan,))
    assert measure(nan, nan, 1e-6, QUIET).first_step is None
    assert measure(nan, reference, 1e-6, QUIET).loss == math.inf


def test_a_tolerance_of_zero_allows_what_is_equal() -> None:
    silent = rounding(record({"a": 0}, {"a": 0}), REFERENCE)
    assert measure(record({"a": 0}, {"a": 0}), REFERENCE, 0.0, silent).first_step is None
    assert measure(record({"a": 0}, {"a": 1e-9}), REFERENCE, 0.0, silent).first_step == 1


def test_the_first_step_with_other_samples() -> None:
    reference = record({}, {}, {}, {}, ids="abc")
    assert first_other_batch(record({}, {}, {}, ids="ab"), reference) is None
    assert first_other_batch(record({}, {}, {}, {}, ids="acb"), reference) == 2
