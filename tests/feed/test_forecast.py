"""The time of an epoch is said once it can be known, and again when it changes much."""

from __future__ import annotations

from distributed_training.feed.forecast import Forecast, duration


def said(forecast: Forecast, start: float, seconds: float, pace: float, size: float, done: int = 0) -> list[str]:
    """What is said while steps come at a pace, each of so many bytes."""
    lines = []
    for tick in range(int(seconds * 2) + 1):
        steps = done + int(tick / 2 * pace)
        line = forecast.look(start + tick / 2, steps, int(steps * size), 0.9 * (start + tick / 2))
        lines += [line] if line is not None else []
    return lines


def test_one_line_at_the_start_and_one_when_it_changes() -> None:
    forecast = Forecast(steps=1000, samples=64_000)
    assert said(forecast, 0.0, 2.0, 4.0, 600_000, done=1) == []
    (line,) = said(forecast, 2.5, 100.0, 4.0, 600_000, done=10)
    assert line.startswith("an epoch will take about 4 min")
    assert "64,000 samples at" in line
    assert "MB/s over the link, training waits 9" in line
    forecast.pause()
    lines = said(forecast, 200.0, 60.0, 40.0, 0, done=500)
    assert len(lines) == 1
    assert lines[0].startswith("an epoch now takes about 2")
    assert "nothing over the link" in lines[0]


def test_short_epochs_are_not_worth_a_word() -> None:
    assert said(Forecast(steps=20, samples=20), 0.0, 60.0, 10.0, 1, done=1) == []


def test_what_is_before_the_first_step_does_not_count() -> None:
    forecast = Forecast(steps=100, samples=100)
    assert said(forecast, 0.0, 50.0, 0.0, 0) == []
    (line,) = said(forecast, 100.0, 10.0, 2.0, 1000, done=1)
    assert line.startswith("an epoch will take about 5")


def test_durations() -> None:
    assert [duration(s) for s in (4.4, 250, 12_000)] == ["4 s", "4 min 10 s", "3 h 20 min"]
