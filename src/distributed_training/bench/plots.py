"""The curves of a run as PNG images, one for each family of metrics."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from distributed_training.bench.canvas import (
    HALF,
    LIGHT,
    WIDE,
    Theme,
    frame,
    legend,
    new_figure,
    plain_text,
    png,
    whole_numbers,
)
from distributed_training.bench.history import History, Series

SPLITS = ("train", "val", "test")
SPLIT_NAMES = {"train": "training", "val": "validation", "test": "test"}
MOST_POINTS = 4000  # more cannot be seen in an image, and make Agg slow
SMOOTH_FROM = 60  # points from which a noisy curve gets a smoothed one over it
HIGHER_IS_BETTER = ("accuracy", "f1", "auc", "precision", "recall", "iou", "bleu", "r2")
LOWER_IS_BETTER = ("loss", "error", "perplexity", "mae", "mse", "rmse", "latency", "seconds", "time")
FROM_ZERO = ("lr", "samples_per_second", "grad_norm")  # axes that start at zero, to show changes at their true size


@dataclass(frozen=True)
class Family:
    """Metrics that share one plot, such as train_loss and val_loss."""

    file: str
    """Name of the image without its ending."""
    title: str
    metrics: tuple[str, ...]


FIXED = {
    "loss": ("loss", "Loss"),
    "accuracy": ("accuracy", "Accuracy"),
    "lr": ("learning_rate", "Learning rate"),
    "grad_norm": ("gradient_norm", "Gradient norm"),
    "samples_per_second": ("throughput", "Samples per second"),
}


def families(history: History) -> list[Family]:
    """The plots that a history can fill: loss first, then quality metrics, then how the training went."""
    groups: dict[str, list[str]] = {}
    for name in history.series:
        if name != "epoch" and history.series[name].finite():
            groups.setdefault(split_of(name)[1], []).append(name)
    own = sorted(group for group in groups if group not in FIXED)
    order = ["loss", "accuracy", *own, "lr", "samples_per_second", "grad_norm"]
    files = {file for file, _ in FIXED.values()}
    found = []
    for group in filter(groups.__contains__, order):
        metrics = tuple(sorted(groups[group], key=lambda name: (*SPLITS, "").index(split_of(name)[0])))
        if group in FIXED:
            found.append(Family(*FIXED[group], metrics))
            continue
        file = _file_name(group)
        while file in files:
            file += "_"
        files.add(file)
        found.append(Family(file, group.replace("_", " ").capitalize(), metrics))
    return found


def split_of(metric: str) -> tuple[str, str]:
    """`val_loss` as ('val', 'loss'); a metric of no split has ''."""
    split, _, rest = metric.partition("_")
    return (split, rest) if split in SPLITS and rest else ("", metric)


def direction(metric: str) -> str | None:
    """Whether small (`min`) or large (`max`) values of a metric are good; None where neither is."""
    words = split_of(metric)[1].lower().split("_")
    if any(word in HIGHER_IS_BETTER for word in words):
        return "max"
    return "min" if any(word in LOWER_IS_BETTER for word in words) else None


def draw(history: History, family: Family, theme: Theme = LIGHT, wide: bool = False) -> bytes:
    """One plot as the bytes of a PNG file."""
    figure = new_figure(theme, WIDE if wide else HALF)
    axes = figure.add_subplot()
    frame(axes, family.title, theme, "step")
    whole_numbers(axes.xaxis)
    axes.set_xlim(-0.01 * history.last_step, 1.015 * history.last_step or 1)  # the same in all plots of a run
    shown = [value for name in family.metrics for _, value in history.series[name].finite()]
    percent = scale(axes, family.metrics[0], shown)
    for name in family.metrics:
        _curve(axes, name, history.series[name], theme, "{:.2%}" if percent else "{:.4g}")
    if family.file == "loss":
        for step in history.resumed_at:
            axes.axvline(step, color=theme.muted, linewidth=1, linestyle=(0, (2, 3)), label="resumed", zorder=1)
    _epochs(axes, history.series.get("epoch"), theme)
    legend(axes, theme)
    return png(figure, theme)


def epoch_marks(epoch: Series | None, most: int = 12) -> list[tuple[int, float]]:
    """Whole epochs and the steps at which they ended, at most `most` of them: every 1st, 2nd, 5th, 10th, ..."""
    points = epoch.finite() if epoch else []
    if len(points) < 2:
        return []
    last = math.floor(max(value for _, value in points) + 1e-6)
    stride = next(s for s in (m * 10**e for e in range(12) for m in (1, 2, 5)) if last // s <= most)
    marks = []
    for mark in range(stride, last + 1, stride):
        before = [point for point in points if point[1] <= mark + 1e-6]
        after = [point for point in points if point[1] >= mark - 1e-6]
        if before and after:
            (s0, e0), (s1, e1) = before[-1], after[0]
            share = 0.0 if abs(e1 - e0) < 1e-9 else (mark - e0) / (e1 - e0)
            marks.append((mark, s0 + share * (s1 - s0)))
    return marks


def smoothed(values: list[float]) -> list[float]:
    """The mean over a window of a fortieth of the curve around each point, which does not lag behind as decay does."""
    half = max(2, len(values) // 80)
    sums, counts = [0.0], [0]
    for value in values:
        finite = math.isfinite(value)
        sums.append(sums[-1] + (value if finite else 0.0))
        counts.append(counts[-1] + finite)
    means = []
    for middle, value in enumerate(values):
        low, high = max(0, middle - half), min(len(values), middle + half + 1)
        shown = math.isfinite(value)  # the others stay gaps
        means.append((sums[high] - sums[low]) / (counts[high] - counts[low]) if shown else math.nan)
    return means


def scale(axes: Any, metric: str, values: list[float]) -> bool:
    """Choose the y axis by the metric that is shown and its values; says whether it is in percent."""
    from matplotlib.ticker import PercentFormatter, StrMethodFormatter

    low, high = min(values), max(values)
    if "accuracy" in metric and low >= 0 and high <= 1:
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
        return True
    if direction(metric) == "min" and low > 0 and high / low > 100:
        axes.set_yscale("log")
    elif high >= 1000:
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    elif low != high:
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    if metric in FROM_ZERO and low >= 0:
        axes.set_ylim(0, high * 1.08 or 1)
    return False


def _file_name(group: str) -> str:
    """A safe file name whatever the metric is called."""
    return re.sub(r"[^a-z0-9]+", "_", group.lower()).strip("_")[:60] or "metric"


def _curve(axes: Any, name: str, series: Series, theme: Theme, number: str) -> None:
    split = split_of(name)[0]
    color = getattr(theme, split or "other")
    label = SPLIT_NAMES.get(split, plain_text(name))
    steps, values = series.steps, series.values
    if len(values) >= SMOOTH_FROM and name != "lr":  # a schedule is exact, there is no noise to smooth
        axes.plot(*_thin(steps, values), color=color, linewidth=0.8, alpha=0.28, solid_joinstyle="round")
        values, label = smoothed(values), f"{label} (smoothed)"
    marker = "o" if len(steps) <= 40 else None
    axes.plot(*_thin(steps, values), color=color, linewidth=1.9, marker=marker, markersize=4, label=label)
    mode = direction(name)
    if split == "val" and mode and len(steps) > 1 and (best := series.best(mode)):
        label = f"best {number.format(best[1])} at step {best[0]:,}"
        style = {"marker": "o", "markersize": 8, "markerfacecolor": theme.background, "markeredgewidth": 1.8}
        axes.plot([best[0]], [best[1]], linestyle="", color=color, label=label, **style)


def _thin(steps: list[int], values: list[float]) -> tuple[list[int], list[float]]:
    every = max(1, math.ceil(len(steps) / MOST_POINTS))
    return steps[::every], values[::every]


def _epochs(axes: Any, epoch: Series | None, theme: Theme) -> None:
    marks = epoch_marks(epoch)
    if not marks:
        return
    for _, step in marks:
        axes.axvline(step, color=theme.grid, linewidth=0.8, zorder=0.5)
    top = axes.secondary_xaxis("top")
    labels = [f"epoch {mark}" if i == 0 else str(mark) for i, (mark, _) in enumerate(marks)]
    top.set_xticks([step for _, step in marks], labels)
    top.tick_params(colors=theme.muted, labelsize=8, length=0, pad=2)
    top.spines["top"].set_visible(False)
