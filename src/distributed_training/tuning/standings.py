"""Who is ahead: the best trial, the best so far after each trial, and the Pareto front of several objectives."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from distributed_training.tuning.records import Search, Trial

_FAR = 4.0


def better(a: float, b: float, mode: str) -> bool:
    """Whether `a` is better than `b`. Any number is better than one that is none."""
    if math.isnan(b):
        return not math.isnan(a)
    return a > b if mode == "max" else a < b


def ranked(search: Search, trials: Sequence[Trial]) -> list[Trial]:
    """The trials that have a figure to compare, best first; of equal ones the earlier. Failed ones are left out."""
    placed = [(trial.value(search.metric), trial) for trial in trials if trial.status != "failed"]
    found = [(value, trial) for value, trial in placed if value is not None]
    sign = -1 if search.mode == "max" else 1
    return [trial for _, trial in sorted(found, key=lambda pair: sign * pair[0])]


def best_trial(search: Search, trials: Sequence[Trial]) -> Trial | None:
    """The trial with the best value of the first objective; None while there is none."""
    return next(iter(ranked(search, trials)), None)


def best_so_far(search: Search, trials: Sequence[Trial]) -> list[tuple[int, float]]:
    """(Number of a trial from 1, its value) of every trial that beat all before it."""
    steps: list[tuple[int, float]] = []
    for number, trial in enumerate(trials, 1):
        value = trial.value(search.metric) if trial.status != "failed" else None
        if value is not None and (not steps or better(value, steps[-1][1], search.mode)):
            steps.append((number, value))
    return steps


def pareto_front(search: Search, trials: Sequence[Trial]) -> list[Trial]:
    """The trials than which no other is as good in every objective and better in one; along the first objective."""
    pairs = [(trial, vector) for trial in ranked(search, trials) if (vector := _vector(search.objectives, trial))]
    front = [
        (trial, own) for trial, own in pairs if not any(_dominates(other, own) for _, other in pairs if other != own)
    ]
    return [trial for trial, _ in front]


def within_reach(values: Sequence[float], mode: str) -> list[float]:
    """The values, those far off on the bad side brought near: one diverged trial must not be all that is seen.

    Far off is what lies many times farther from the best than three of four trials do; it is put a little behind the
    worst of the others.
    """
    if len(values) < 4:
        return list(values)
    sign = -1.0 if mode == "max" else 1.0
    ordered = sorted(sign * value for value in values)
    best, poor = ordered[0], ordered[len(ordered) * 3 // 4]
    near = [value for value in ordered if value <= poor + _FAR * (poor - best)]
    if poor == best or len(near) == len(ordered):
        return list(values)
    edge = near[-1] + 0.2 * (near[-1] - best)
    return [sign * min(sign * value, edge) for value in values]


def count(trials: Sequence[Trial]) -> dict[str, int]:
    """How many trials there are of each status, in the order of a trial's life."""
    counts: Counter[str] = Counter(trial.status for trial in trials)
    order = ("pending", "running", "paused", "completed", "stopped", "failed")
    return {status: counts[status] for status in order if counts[status]}


def status_text(status: str) -> str:
    """A status in words."""
    return "stopped early" if status == "stopped" else status


def count_text(trials: Sequence[Trial]) -> str:
    """`2 running, 7 completed, 3 stopped early`."""
    return ", ".join(f"{number} {status_text(status)}" for status, number in count(trials).items())


def _vector(objectives: Mapping[str, str], trial: Trial) -> tuple[float, ...] | None:
    """The values of all objectives, small ones good; None where one is missing."""
    values = [(trial.value(metric), mode) for metric, mode in objectives.items()]
    if any(value is None for value, _ in values):
        return None
    return tuple(-value if mode == "max" else value for value, mode in values if value is not None)


def _dominates(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return all(x <= y for x, y in zip(a, b)) and a != b
