"""Parallel coordinates: every trial as a line through its parameters to what came of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from distributed_training.bench.canvas import LIGHT, WIDE, Theme, new_figure, plain_text, png
from distributed_training.tuning.axes import Axis, axes_of
from distributed_training.tuning.records import Search, Trial
from distributed_training.tuning.standings import ranked, within_reach

MOST_AXES = 12
NOT_SET = -0.16  # where a line passes an axis whose parameter the trial did not have
_LOG_RATIO = 100.0


def draw_parallel(search: Search, trials: Sequence[Trial], theme: Theme = LIGHT) -> bytes | None:
    """One axis for each parameter, the objective last. The darker (on dark: the brighter) a line, the better."""
    placed = ranked(search, trials)
    axes_there = axes_of(search, placed)[:MOST_AXES]
    if len(placed) < 2 or not axes_there:
        return None
    goal = _goal(search, placed)
    every = [*axes_there, goal]
    figure = new_figure(theme, (max(WIDE[0], 1.5 * len(every) + 1), 5.0))
    canvas = figure.add_subplot()
    canvas.set_facecolor(theme.background)
    title = f"Which parameters lead to which {plain_text(search.metric)}"
    canvas.set_title(title, loc="left", color=theme.text, fontsize=13, fontweight="bold", pad=26)
    colours = _colours(len(placed), theme)
    for place, trial in reversed(list(enumerate(placed))):  # the best on top
        values = [trial.parameters.get(axis.key) for axis in axes_there] + [trial.value(search.metric)]
        line = [axis.place(value) for axis, value in zip(every, values)]
        xs, ys = _smooth([NOT_SET if y is None else y for y in line])
        best = place == 0
        width, alpha = (2.6, 1.0) if best else (1.1, max(0.25, 0.9 - 0.6 * place / len(placed)))
        colour = theme.val if best else colours[place]
        canvas.plot(xs, ys, color=colour, linewidth=width, alpha=alpha, zorder=3 - place / len(placed))
    missing = {a for a in axes_there if any(a.place(trial.parameters.get(a.key)) is None for trial in placed)}
    for x, axis in enumerate(every):
        _axis(canvas, x, axis, theme, axis in missing)
    canvas.plot([], [], color=theme.val, linewidth=2.6, label=f"best: trial {placed[0].id}")
    canvas.plot([], [], color=colours[min(1, len(placed) - 1)], linewidth=1.6, label="good")
    canvas.plot([], [], color=colours[-1], linewidth=1.6, alpha=0.5, label="bad")
    made = canvas.legend(
        loc="lower right", bbox_to_anchor=(1.0, 1.06), ncols=3, fontsize=9, labelcolor=theme.text, frameon=False
    )
    made.set_in_layout(False)
    canvas.set_xlim(-0.35, len(every) - 1 + 0.45)
    canvas.set_ylim(NOT_SET - 0.06 if missing else -0.04, 1.05)
    canvas.axis("off")
    return png(figure, theme)


def _goal(search: Search, placed: Sequence[Trial]) -> Axis:
    """The axis of the objective; a long tail of bad values gets a logarithm."""
    values = [value for trial in placed if (value := trial.value(search.metric)) is not None]
    values = within_reach(values, search.mode)  # what is worse lies at the end of the axis
    low, high = min(values), max(values)
    if high == low:
        low, high = low - 0.5, high + 0.5
    log = low > 0 and high / low > _LOG_RATIO
    return Axis(search.metric, search.metric, log, False, low, high)


def _colours(number: int, theme: Theme) -> list[Any]:
    """A colour for each rank, the best with the most contrast; cividis is even for all kinds of eyes."""
    import matplotlib

    colours = matplotlib.colormaps["cividis"]
    ends = (0.0, 0.8) if theme.background.lower() == LIGHT.background else (1.0, 0.25)
    return [colours(ends[0] + (ends[1] - ends[0]) * n / max(1, number - 1)) for n in range(number)]


def _smooth(ys: Sequence[float], points: int = 24) -> tuple[list[float], list[float]]:
    """A line through one height for each axis that meets every axis level, so that crossings can be followed."""
    xs, smooth = [], []
    for x, (start, end) in enumerate(pairwise(ys)):
        for n in range(points):
            share = n / points
            xs.append(x + share)
            smooth.append(start + (end - start) * (1 - math.cos(math.pi * share)) / 2)
    return [*xs, float(len(ys) - 1)], [*smooth, ys[-1]]


def _axis(canvas: Any, x: int, axis: Axis, theme: Theme, missing: bool) -> None:
    canvas.plot([x, x], [0, 1], color=theme.muted, linewidth=1.1, zorder=4)
    ticks = axis.ticks()
    if missing:
        ticks = [*ticks, (NOT_SET, "not set")]
    box = {"facecolor": theme.background, "edgecolor": "none", "alpha": 0.8, "pad": 0.8}
    for y, text in ticks:
        canvas.plot([x - 0.012, x + 0.012], [y, y], color=theme.muted, linewidth=1.1, zorder=4)
        shown = text if len(text) <= 16 else text[:15] + "…"
        canvas.text(
            x + 0.03, y, plain_text(shown), color=theme.text, fontsize=8.5, va="center", ha="left", bbox=box, zorder=5
        )
    name = axis.label if len(axis.label) <= 18 else "…" + axis.label[-17:]
    name += " (log)" if axis.log else ""
    canvas.text(x, 1.06, plain_text(name), color=theme.text, fontsize=10, ha="center", va="bottom", fontweight="bold")
