"""Steps that are not finite are counted, told, and end the run when they do not stop."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch

from distributed_training.data.base import Batch
from distributed_training.runtime.errors import TrainingDivergedError
from distributed_training.strategies.base import StepResult
from distributed_training.training.guard import NonfiniteGuard

CPU = torch.device("cpu")
GOOD, BAD = StepResult(None, False), StepResult(None, True)


def batch(data: Any = None, ids: tuple[int, ...] = (7, 8, 9)) -> Batch:
    return Batch(np.array(ids), data if data is not None else (torch.ones(len(ids), 2), torch.zeros(len(ids))))


def test_single_bad_steps_are_warned_about_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    guard = NonfiniteGuard(2, CPU)
    with caplog.at_level(logging.WARNING):
        for step, result in enumerate([BAD, GOOD, BAD, GOOD, BAD]):
            guard.update(result, batch(), 1, step)
        guard.check()
    assert guard.skipped == 3
    assert "epoch 1, step 2 skipped: loss or gradient is not finite" in caplog.text


def test_a_streak_ends_the_run_with_advice() -> None:
    guard = NonfiniteGuard(3, CPU)
    guard.update(BAD, batch(), 0, 0)
    guard.update(BAD, batch(), 0, 1)
    with pytest.raises(TrainingDivergedError, match=r"3 steps in a row \(epoch 0, step 2\); .*Lower training\.lr"):
        guard.update(BAD, batch(), 0, 2)
    assert guard.skipped == 3


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("shape", [(3, 2), (3,), (3, 1, 2, 2)])
def test_a_sample_that_is_itself_not_finite_is_named(
    caplog: pytest.LogCaptureFixture, value: float, shape: tuple[int, ...]
) -> None:
    x = torch.ones(shape)
    x[1] = value
    NonfiniteGuard(2, CPU).update(BAD, batch({"scalar": torch.tensor(0.0), "x": x, "y": torch.zeros(3).long()}), 0, 0)
    assert "the inputs of sample 8 are not finite" in caplog.text


def test_the_culprit_is_part_of_the_error() -> None:
    x = torch.ones(3, 2)
    x[[0, 2], 1] = float("nan")
    with pytest.raises(TrainingDivergedError, match="the inputs of sample 7, 9 are not finite"):
        NonfiniteGuard(1, CPU).update(BAD, batch((x, torch.zeros(3))), 0, 0)


class TestOnDevice:
    """What a GPU's steps report are tensors that nobody reads until the loss is logged."""

    @pytest.fixture
    def guard(self) -> NonfiniteGuard:
        guard = NonfiniteGuard(3, CPU)
        guard._deferred = True
        return guard

    def feed(self, guard: NonfiniteGuard, *flags: int) -> None:
        for step, flag in enumerate(flags):
            guard.update(StepResult(None, torch.tensor([float(flag)])), batch(), 0, step)

    def test_counts_are_read_when_asked(self, guard: NonfiniteGuard, caplog: pytest.LogCaptureFixture) -> None:
        self.feed(guard, 1, 0, 1, 1, 0)
        assert guard.skipped == 0
        guard.check()
        assert guard.skipped == 3
        assert [f"step {step} skipped" in caplog.text for step in range(5)] == [True, False, True, True, False]

    def test_a_streak_is_found_afterwards(self, guard: NonfiniteGuard) -> None:
        self.feed(guard, 0, 1, 1, 1, 0, 0)
        with pytest.raises(TrainingDivergedError, match=r"3 steps in a row \(epoch 0, step 3\)"):
            guard.check()

    def test_scattered_ones_are_no_streak(self, guard: NonfiniteGuard) -> None:
        self.feed(guard, 1, 1, 0, 1, 1, 0, 1)
        guard.check()
        assert guard.skipped == 5

    def test_a_streak_may_span_two_checks(self, guard: NonfiniteGuard) -> None:
        self.feed(guard, 0, 1, 1)
        guard.check()
        self.feed(guard, 1)
        with pytest.raises(TrainingDivergedError):
            guard.check()


def test_flags_in_tensors_are_understood_on_a_cpu_too(caplog: pytest.LogCaptureFixture) -> None:
    """fp16's loss scaler answers in tensors wherever it runs."""
    guard = NonfiniteGuard(3, CPU)
    guard.update(StepResult(None, torch.tensor([1.0])), batch(), 0, 0)
    guard.update(StepResult(None, torch.tensor([0.0])), batch(), 0, 1)
    guard.check()
    assert guard.skipped == 1
