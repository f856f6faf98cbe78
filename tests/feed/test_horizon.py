"""More is prepared ahead while training waits, less when it never does."""

from __future__ import annotations

from distributed_training.feed.horizon import Horizon


def test_it_grows_while_training_waits_and_shrinks_when_it_does_not() -> None:
    horizon = Horizon(least=4, most=64)
    for _ in range(200):
        horizon.waited()
        horizon.delivered(1, 0, 0.0)
    assert horizon.steps == 64
    for step in range(20_000):
        horizon.delivered(1, horizon.steps - 1, float(step))
    assert horizon.steps == 4


def test_it_stays_while_what_is_ready_is_needed() -> None:
    horizon = Horizon(least=4, most=64)
    for _ in range(200):
        horizon.waited()
        horizon.delivered(1, 0, 0.0)
    for step in range(5000):
        horizon.delivered(1, step % 60, float(step))
    assert horizon.steps == 64


def test_memory_bounds_it() -> None:
    horizon = Horizon(least=4, most=64)
    horizon.bound(2)
    horizon.delivered(100, 2, 0.0)
    assert horizon.steps == 2


def test_quick_steps_are_prepared_further_ahead_so_that_they_can_be_ordered_together() -> None:
    horizon = Horizon(least=4, most=64)
    for step in range(1000):
        horizon.delivered(1, horizon.steps - 1, step * 0.0025)
    assert 38 <= horizon.steps <= 41  # a tenth of a second
    for step in range(1000):
        horizon.delivered(1, horizon.steps - 1, 2.5 + step * 0.0001)
    assert horizon.steps == 64


def test_they_are_prepared_further_ahead_while_they_take_little_memory() -> None:
    horizon = Horizon(least=4, most=1000)
    horizon.bound(1000, light=1000)
    for step in range(1000):
        horizon.delivered(1, horizon.steps - 1, step * 0.0025)
    assert 155 <= horizon.steps <= 161  # four tenths
    horizon = Horizon(least=4, most=1000)
    horizon.bound(1000, light=70)
    for step in range(1000):
        horizon.delivered(1, horizon.steps - 1, step * 0.0025)
    assert horizon.steps == 70
    horizon = Horizon(least=4, most=1000)
    horizon.bound(1000, light=7)
    for step in range(1000):
        horizon.delivered(1, horizon.steps - 1, step * 0.0025)
    assert 38 <= horizon.steps <= 41
