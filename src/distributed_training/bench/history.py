"""The history of a run as series of numbers, read from its `events.jsonl`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from distributed_training.runtime.errors import RunDirectoryError
from distributed_training.runtime.run_directory import RunDirectory

NOT_METRICS = {"event", "time", "step", "path", "status"}


@dataclass
class Series:
    """One metric over the steps. A value that was not finite is NaN."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    @property
    def last(self) -> float:
        """The newest value."""
        return self.values[-1]

    def finite(self) -> list[tuple[int, float]]:
        """The (step, value) pairs that can be compared and drawn."""
        return [(step, value) for step, value in zip(self.steps, self.values) if math.isfinite(value)]

    def best(self, mode: str) -> tuple[int, float] | None:
        """The step and value of the smallest (`min`) or largest (`max`) value, the first of equal ones."""
        choose = min if mode == "min" else max
        return choose(self.finite(), key=lambda point: point[1], default=None)

    def cut_after(self, step: int) -> None:
        """Forget the points after a step."""
        kept = [(s, v) for s, v in zip(self.steps, self.values) if s <= step]
        self.steps, self.values = [s for s, _ in kept], [v for _, v in kept]


@dataclass
class History:
    """All that was recorded of a run, as if it had run in one piece."""

    series: dict[str, Series] = field(default_factory=dict)
    """Each metric by its name."""
    status: str | None = None
    """How the run ended; None while it runs, and for one that was killed."""
    summary: dict[str, float] = field(default_factory=dict)
    """The final figures that the trainer gave."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Machine, versions, model size, dataset."""
    resumed_at: list[int] = field(default_factory=list)
    """The steps from which the run was continued."""
    started: float | None = None
    """Time of the first event, in seconds since 1970."""
    ended: float | None = None
    """Time of the last event."""

    @property
    def last_step(self) -> int:
        """The newest step of which anything is known."""
        return max((series.steps[-1] for series in self.series.values() if series.steps), default=0)


def load_history(run: RunDirectory) -> History:
    """Read a run's events.

    After a resume from step N the steps past N were trained again: what the earlier process wrote about them is
    dropped, so that no curve overlaps itself.
    """
    history = History()
    events = [event for event in run.events() if isinstance(event, dict) and "event" in event]
    for event in events:
        _apply(event, history)
    if not events:
        raise RunDirectoryError(
            f"{run.path}: no events to report ({run.events_file.name} is missing or empty); "
            "give a folder made by dtrain train"
        )
    return history


def _apply(event: Mapping[str, Any], history: History) -> None:
    kind, time = event.get("event"), event.get("time")
    if isinstance(time, (int, float)) and math.isfinite(time):
        history.started = time if history.started is None else history.started
        history.ended = time
    if kind == "start":
        _restart(event, history)
    elif kind == "metrics" and isinstance(event.get("step"), int):
        for name, value in _numbers(event).items():
            series = history.series.setdefault(name, Series())
            series.steps.append(event["step"])
            series.values.append(value)
    elif kind == "finish":
        history.status = str(event.get("status", "unknown"))
        history.summary = _numbers(event)


def _restart(event: Mapping[str, Any], history: History) -> None:
    resumed_from = event.get("resumed_from")
    if isinstance(resumed_from, int):
        history.resumed_at = [step for step in history.resumed_at if step <= resumed_from] + [resumed_from]
    else:  # from the beginning, in the folder of an earlier try
        history.resumed_at, history.started = [], history.ended
    for name in list(history.series):
        history.series[name].cut_after(resumed_from if isinstance(resumed_from, int) else -1)
        if not history.series[name].steps:
            del history.series[name]
    history.status, history.summary = None, {}
    facts = event.get("facts")
    history.facts = dict(facts) if isinstance(facts, dict) else {}


def _numbers(event: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a line. JSON's null stands for a value that was not finite."""
    numbers = {}
    for name, value in event.items():
        if name not in NOT_METRICS and not isinstance(value, bool) and isinstance(value, (int, float, type(None))):
            numbers[name] = math.nan if value is None else float(value)
    return numbers
