"""What depends on what: each parameter against the objective, and several objectives against each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distributed_training.bench.canvas import LIGHT, WIDE, Theme, frame, legend_above, new_figure, plain_text, png
from distributed_training.bench.plots import scale
from distributed_training.tuning.axes import Axis, axes_of
from distributed_training.tuning.plots import OFF, STOPPED
from distributed_training.tuning.records import Search, Trial
from distributed_training.tuning.standings import best_trial, pareto_front, within_reach

MOST_SLICES = 12


def draw_slices(search: Search, trials: Sequence[Trial], theme: Theme = LIGHT) -> bytes | None:
    """Each parameter against the first objective, one small plot each."""
    compared = [(t, v) for t in trials if t.status != "failed" and (v := t.value(search.metric)) is not None]
    parameters = axes_of(search, [trial for trial, _ in compared])[:MOST_SLICES]
    if not parameters:
        return None
    heights = within_reach([value for _, value in compared], search.mode)  # what is far off lies at the edge
    compared = [(trial, value) for (trial, _), value in zip(compared, heights)]
    columns = min(3, len(parameters))
    rows = -(-len(parameters) // columns)
    figure = new_figure(theme, (WIDE[0], 0.3 + 2.5 * rows))
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    best = best_trial(search, trials)
    for place, axes in enumerate(grid.flat):
        if place >= len(parameters):
            axes.set_visible(False)
            continue
        _slice(axes, search, parameters[place], compared, best, theme)
        scale(axes, search.metric, [value for _, value in compared])
        if place % columns == 0:
            axes.set_ylabel(plain_text(search.metric), color=theme.muted, fontsize=10)
    title = f"Each parameter against {plain_text(search.metric)} (orange: the best trial)"
    figure.suptitle(title, x=0.012, ha="left", color=theme.text, fontsize=13, fontweight="bold")
    return png(figure, theme)


def draw_pareto(search: Search, trials: Sequence[Trial], theme: Theme = LIGHT) -> bytes | None:
    """The first objective against each other one; trials on the front of all objectives are filled and joined."""
    metrics = list(search.objectives)
    front = pareto_front(search, trials)
    if len(metrics) < 2 or not front:
        return None
    others = metrics[1:4]
    figure = new_figure(theme, WIDE)
    panels = figure.subplots(1, len(others), squeeze=False)[0]
    for number, (axes, other) in enumerate(zip(panels, others)):
        title = "Pareto front" if number == 0 else ""
        frame(axes, title, theme, f"{search.metric} ({_good(search.mode)})")
        axes.set_ylabel(plain_text(f"{other} ({_good(search.objectives[other])})"), color=theme.muted, fontsize=10)
        beaten = [pair for trial in trials if trial not in front and (pair := _pair(trial, search.metric, other))]
        best = sorted(pair for trial in front if (pair := _pair(trial, search.metric, other)))
        rest = _near(beaten, best, search.mode, search.objectives[other])
        far = [pair for pair, own in zip(rest, beaten) if pair != own]
        near = [pair for pair, own in zip(rest, beaten) if pair == own]
        if near:
            axes.scatter(*zip(*near), s=30, edgecolors=theme.muted, zorder=2, label="beaten by another", **STOPPED)
        if far:
            axes.scatter(*zip(*far), s=30, marker="x", color=theme.muted, zorder=2, label="off the scale")
        scale(axes, other, [y for _, y in [*rest, *best]])
        _scale_x(axes, search.metric, [x for x, _ in [*rest, *best]])
        if len(metrics) == 2:  # of more objectives the front is no line in any two of them
            steps = "steps-pre" if search.mode == "max" else "steps-post"  # what can be had at each first value
            axes.plot(*zip(*best), drawstyle=steps, color=theme.val, linewidth=1.2, alpha=0.7, zorder=2.5)
        axes.scatter(*zip(*best), s=48, color=theme.val, zorder=3, linewidths=0, label=f"front: {len(front)} trials")
    legend_above(panels[-1], theme)
    return png(figure, theme)


def _slice(
    axes: Any, search: Search, axis: Axis, compared: Sequence[tuple[Trial, float]], best: Trial | None, theme: Theme
) -> None:
    from matplotlib.ticker import NullLocator

    frame(axes, "", theme, axis.label + (" (log)" if axis.log else ""))
    points: dict[str, list[tuple[float, float]]] = {"best": [], "stopped": [], "off": [], "": []}
    for trial, y in compared:
        if (x := axis.place(trial.parameters.get(axis.key))) is not None:
            kind = "off" if trial.value(search.metric) != y else "stopped" if trial.status == "stopped" else ""
            points["best" if trial is best else kind].append((x, y))
    looks: dict[str, dict[str, Any]] = {
        "": {"s": 18, "color": theme.train, "alpha": 0.85, "zorder": 3, "linewidths": 0},
        "stopped": {"s": 18, "edgecolors": theme.muted, "zorder": 2, **STOPPED, "linewidths": 0.9},
        "off": {"s": 18, "color": theme.muted, "marker": OFF[search.mode], "zorder": 2},
        "best": {"s": 52, "color": theme.val, "zorder": 4, "linewidths": 0},
    }
    for kind, look in looks.items():
        if points[kind]:
            axes.scatter(*zip(*points[kind]), **look)
    ticks = axis.ticks(5)
    axes.set_xticks([x for x, _ in ticks], [plain_text(_short(text, 14)) for _, text in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(-0.04, 1.04)


def _pair(trial: Trial, first: str, second: str) -> tuple[float, float] | None:
    x, y = trial.value(first), trial.value(second)
    return (x, y) if x is not None and y is not None and trial.status != "failed" else None


def _near(
    rest: list[tuple[float, float]], best: list[tuple[float, float]], first: str, second: str
) -> list[tuple[float, float]]:
    """Those that are beaten, the ones far off brought to the edge."""
    both = [*rest, *best]
    xs, ys = within_reach([x for x, _ in both], first), within_reach([y for _, y in both], second)
    return list(zip(xs, ys))[: len(rest)]


def _good(mode: str) -> str:
    return "higher is better" if mode == "max" else "lower is better"


def _scale_x(axes: Any, metric: str, values: list[float]) -> None:
    from matplotlib.ticker import PercentFormatter

    if "accuracy" in metric and min(values) >= 0 and max(values) <= 1:
        axes.xaxis.set_major_formatter(PercentFormatter(xmax=1))
    elif min(values) > 0 and max(values) / min(values) > 100:
        axes.set_xscale("log")


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
