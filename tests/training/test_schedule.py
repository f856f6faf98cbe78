"""The learning rate is a function of the step."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from distributed_training.training.schedule import Schedule


def optimizer(*rates: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates], lr=1.0)


def rates(shape: str, epochs: int, warmup: float, steps: int, peak: float = 1.0) -> list[float]:
    schedule = Schedule(optimizer(peak), shape, epochs, warmup)
    found = []
    for epoch in range(epochs):
        for step in range(steps):
            schedule.apply(epoch, step, steps)
            found.append(schedule.lr)
    return found


def test_constant_stays() -> None:
    assert rates("constant", 2, 0, 3, peak=0.3) == [0.3] * 6


def test_warm_up_rises_from_one_steps_share_to_the_peak() -> None:
    assert rates("constant", 2, 1, 4) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1, 1, 1, 1])


def test_warm_up_may_end_inside_an_epoch() -> None:
    assert rates("constant", 1, 0.5, 4) == pytest.approx([0.5, 1.0, 1.0, 1.0])


def test_cosine_falls_to_zero_over_what_is_left() -> None:
    found = rates("cosine", 3, 1, 2, peak=2.0)
    assert found[:2] == pytest.approx([1.0, 2.0])
    expected = [2.0 * 0.5 * (1 + math.cos(math.pi * k / 4)) for k in range(4)]
    assert found[2:] == pytest.approx(expected)
    assert found[2:] == sorted(found[2:], reverse=True)


def test_cosine_without_warm_up_starts_at_the_peak() -> None:
    assert rates("cosine", 2, 0, 5)[0] == 1.0


def test_step_divides_by_ten_at_each_third() -> None:
    assert rates("step", 3, 0, 2) == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])


def test_a_warm_up_as_long_as_the_training_ends_at_the_peak() -> None:
    assert rates("cosine", 2, 2, 2) == pytest.approx([0.25, 0.5, 0.75, 1.0])


def test_each_group_keeps_its_share_of_its_own_peak() -> None:
    both = optimizer(1.0, 0.01)
    Schedule(both, "cosine", 4, 0).apply(2, 0, 10)
    assert [group["lr"] for group in both.param_groups] == pytest.approx([0.5, 0.005])


def test_a_loaded_optimizer_state_does_not_stop_the_schedule() -> None:
    """Loading replaces the groups; the schedule must not go on with the old ones."""
    own = optimizer(1.0)
    schedule = Schedule(own, "cosine", 4, 0)
    saved = own.state_dict()
    saved["param_groups"][0]["lr"] = 123.0
    own.load_state_dict(saved)
    schedule.apply(2, 0, 10)
    assert own.param_groups[0]["lr"] == pytest.approx(0.5)
    assert schedule.lr == pytest.approx(0.5)


def test_without_a_number_of_steps_the_rate_changes_by_epoch() -> None:
    schedule = Schedule(optimizer(1.0), "cosine", 4, 0)
    schedule.apply(2, 17, None)
    assert schedule.lr == pytest.approx(0.5)


def test_a_warm_up_without_a_number_of_steps_never_has_a_rate_of_zero() -> None:
    schedule = Schedule(optimizer(1.0), "cosine", 4, 1)
    schedule.apply(0, 0, None)
    assert schedule.lr > 0


def test_afterwards_the_peaks_can_be_put_back() -> None:
    both = optimizer(1.0, 0.01)
    schedule = Schedule(both, "cosine", 4, 0)
    schedule.apply(3, 0, 10)
    schedule.reset()
    assert [group["lr"] for group in both.param_groups] == [1.0, 0.01]


def test_a_constant_rate_is_never_touched() -> None:
    """A user's scheduler, or a callback, may be changing it."""
    own = optimizer(1.0)
    schedule = Schedule(own, "constant", 4, 0)
    own.param_groups[0]["lr"] = 0.3
    schedule.apply(0, 0, 10)
    schedule.reset()
    assert schedule.lr == 0.3


def test_beyond_the_last_epoch_the_rate_stays_where_it_ended() -> None:
    schedule = Schedule(optimizer(1.0), "step", 3, 0)
    schedule.apply(5, 0, 2)
    assert schedule.lr == pytest.approx(0.01)
