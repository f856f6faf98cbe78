"""A search as PNG images: its history, the curves of its trials, and what mattered.

Colours are told apart by everybody: blue for a trial that ran to its end, grey for one that was stopped, orange for the
best. Shapes say the same once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distributed_training.bench.canvas import (
    LIGHT,
    WIDE,
    Theme,
    frame,
    legend_above,
    new_figure,
    plain_text,
    png,
    whole_numbers,
)
from distributed_training.bench.plots import scale
from distributed_training.tuning.axes import Axis
from distributed_training.tuning.importance import Importance
from distributed_training.tuning.records import Search, Trial
from distributed_training.tuning.standings import best_so_far, best_trial, within_reach

MOST_CURVES = 200  # more lines than that are a cloud
STOPPED = {"marker": "o", "facecolors": "none", "linewidths": 1.2}
"""How a trial looks that did not run to its end."""
OFF = {"min": "^", "max": "v"}
"""How one looks that is too bad for the scale, and lies at its edge."""


def draw_history(search: Search, trials: Sequence[Trial], theme: Theme = LIGHT) -> bytes | None:
    """Every trial's value by its number, and the best so far as a line."""
    found = [(n, t) for n, t in enumerate(trials, 1) if t.status != "failed" and t.value(search.metric) is not None]
    if not found:
        return None
    figure = new_figure(theme, WIDE)
    axes = figure.add_subplot()
    frame(axes, f"{search.metric} of every trial", theme, "trial")
    whole_numbers(axes.xaxis)
    true = [value for _, trial in found if (value := trial.value(search.metric)) is not None]
    values = within_reach(true, search.mode)
    percent = scale(axes, search.metric, values)
    label = "completed" if all(trial.over for trial in trials) else "completed or running"
    looks: dict[str, dict[str, Any]] = {
        "stopped early": {"edgecolors": theme.muted, "zorder": 2, **STOPPED},
        label: {"color": theme.train, "zorder": 3, "linewidths": 0},
        "off the scale": {"color": theme.muted, "marker": OFF[search.mode], "zorder": 3},
    }
    points: dict[str, list[tuple[int, float]]] = {name: [] for name in looks}
    for (n, trial), value, own in zip(found, values, true):
        kind = "off the scale" if value != own else "stopped early" if trial.status == "stopped" else label
        points[kind].append((n, value))
    for name, look in looks.items():
        if points[name]:
            axes.scatter(*zip(*points[name]), s=34, label=name, **look)
    failed = [n for n, trial in enumerate(trials, 1) if trial.status == "failed"]
    if failed:
        at_bottom = {"transform": axes.get_xaxis_transform(), "clip_on": False}
        axes.scatter(failed, [0.0] * len(failed), marker="x", s=34, color=theme.text, label="failed", **at_bottom)
    steps = best_so_far(search, trials)
    if steps:
        xs, ys = [n for n, _ in steps] + [len(trials)], [value for _, value in steps] + [steps[-1][1]]
        label = f"best so far: {figure_text(steps[-1][1], percent)}"
        axes.plot(xs, ys, drawstyle="steps-post", color=theme.val, linewidth=1.9, label=label, zorder=2.5)
        axes.plot([steps[-1][0]], [steps[-1][1]], "o", color=theme.val, markersize=8, zorder=4)
    axes.set_xlim(0.3, len(trials) + 0.7)
    legend_above(axes, theme)
    return png(figure, theme)


def draw_curves(search: Search, trials: Sequence[Trial], theme: Theme = LIGHT) -> bytes | None:
    """The first objective over the epochs of every trial, with the points at which trials were stopped."""
    best = best_trial(search, trials)
    shown = [trial for trial in trials if len(_finite(trial)) > 1 or (trial.status == "stopped" and _finite(trial))]
    if sum(len(_finite(trial)) > 1 for trial in shown) == 0:
        return None
    shown = [trial for trial in shown if trial is not best][-MOST_CURVES:] + [t for t in shown if t is best]
    figure = new_figure(theme, WIDE)
    axes = figure.add_subplot()
    frame(axes, f"{search.metric} while training", theme, "epoch")
    whole_numbers(axes.xaxis)
    values = within_reach([value for trial in shown for _, value in _finite(trial)], search.mode)
    percent = scale(axes, search.metric, values)
    ends = [_finite(trial)[-1] for trial in shown if trial.status == "stopped"]
    if ends:
        axes.scatter(*zip(*ends), s=22, edgecolors=theme.muted, zorder=2.5, label="stopped early", **STOPPED)
    thin = 0.9 if len(shown) > 60 else 1.2
    for trial in shown:
        xs, ys = zip(*_finite(trial))
        if trial is best:
            label = f"best: {figure_text(trial.value(search.metric) or 0.0, percent)} (trial {trial.id})"
            marker = "o" if len(xs) <= 40 else None
            axes.plot(xs, ys, color=theme.val, linewidth=2.2, marker=marker, markersize=4, zorder=4, label=label)
        elif trial.status == "stopped":
            axes.plot(xs, ys, color=theme.muted, linewidth=thin, alpha=0.45, zorder=2)
        elif trial.status == "failed":
            axes.plot(xs, ys, color=theme.text, linewidth=thin, alpha=0.8, linestyle=(0, (3, 2)), label="failed")
        else:
            label, dashes = ("completed", "-") if trial.over else ("still running", ":")
            axes.plot(xs, ys, dashes, color=theme.train, linewidth=thin, alpha=0.6, zorder=3, label=label)
    if values != [value for trial in shown for _, value in _finite(trial)]:  # what lies far off leaves the picture
        room = 0.08 * (max(values) - min(values))
        axes.set_ylim(min(values) - room * (axes.get_yscale() == "linear"), max(values) + room)
    legend_above(axes, theme)
    return png(figure, theme)


def draw_importance(found: Importance, axes_there: Sequence[Axis], metric: str, theme: Theme = LIGHT) -> bytes | None:
    """The share of each parameter as a bar."""
    if not found.shares:
        return None
    labels = {axis.key: axis.label for axis in axes_there}
    rows = list(found.shares.items())[:16][::-1]
    figure = new_figure(theme, (WIDE[0], max(2.2, 1.15 + 0.36 * len(rows))))
    axes = figure.add_subplot()
    frame(axes, f"What {metric} depends on", theme, found.method)
    bars = axes.barh([plain_text(labels.get(key, key)) for key, _ in rows], [share for _, share in rows], height=0.62)
    for bar, (_, share) in zip(bars, rows):
        bar.set_color(theme.train)
        text = f"{share:.0%}" if share >= 0.005 else "below 1%"
        axes.annotate(
            text, (share, bar.get_y() + bar.get_height() / 2), xytext=(6, 0), textcoords="offset points", va="center",
            color=theme.text, fontsize=9,
        )  # fmt: skip
    axes.grid(visible=False)
    axes.set_xticks([])
    axes.tick_params(axis="y", labelcolor=theme.text, labelsize=10)
    axes.spines["bottom"].set_visible(False)
    axes.set_xlim(0, max(share for _, share in rows) * 1.12)
    return png(figure, theme)


def figure_text(value: float, percent: bool) -> str:
    """A value as the axis shows it."""
    return f"{value:.2%}" if percent else f"{value:.4g}"


def _finite(trial: Trial) -> list[tuple[float, float]]:
    return [(epoch, value) for epoch, value in trial.history if value == value and abs(value) != float("inf")]
