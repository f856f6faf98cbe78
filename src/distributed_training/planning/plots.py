"""The scaling curve of a plan, to 1,024 GPUs."""

from __future__ import annotations

from typing import Any

from distributed_training.bench.canvas import WIDE, Theme, frame, legend, new_figure, plain_text, png
from distributed_training.planning.predictions import Plan

_KINDS = {"strong": "the same batch, divided", "weak": "the same batch on each GPU"}


def draw_scaling(plan: Plan, theme: Theme) -> bytes:
    """Speed-up over one device for each strategy: strong on the left, weak on the right, the ideal as a thin line."""
    figure = new_figure(theme, (WIDE[0], WIDE[1] * 1.05))
    for place, kind in enumerate(_KINDS, 1):
        _panel(figure.add_subplot(1, 2, place), plan, kind, theme)
    return png(figure, theme)


def _panel(axes: Any, plan: Plan, kind: str, theme: Theme) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    frame(axes, f"{kind.capitalize()} scaling: {_KINDS[kind]}", theme, "GPUs")
    colours = [theme.train, theme.val, theme.test, theme.other, theme.muted]
    longest = 1
    labels = [curve.label for curve in plan.curves if curve.kind == kind]
    for curve in plan.curves:
        if curve.kind != kind or not curve.points:
            continue
        alone = curve.points[0][1]
        counts = [n for n, _ in curve.points]
        longest = max(longest, counts[-1])
        colour = colours[labels.index(curve.label) % len(colours)]
        values = [rate / alone for _, rate in curve.points]
        axes.plot(counts, values, color=colour, linewidth=2, marker="o", markersize=3, label=plain_text(curve.label))
    axes.plot([1, longest], [1, longest], color=theme.muted, linewidth=1, linestyle=":", label="ideal")
    for one in plan.predictions:
        if one.measured_step is not None and one.way.label in labels and kind == plan.scaling and plan.curves:
            alone = next(c.points[0][1] for c in plan.curves if c.kind == kind)
            speed = one.global_batch / one.measured_step / alone
            axes.plot([one.ranks], [speed], "x", color=theme.text, markersize=7, label="measured")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(FixedLocator([4.0**n for n in range(-1, 6)]))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.set_ylabel("times as fast as one", color=theme.muted, fontsize=10)
    legend(axes, theme, loc="upper left")
