"""The plots that parts ask for, as PNG: bars that begin at zero, and lines over processes, workers or sizes."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

from distributed_training.bench.canvas import HALF, WIDE, Theme, frame, legend, new_figure, plain_text, png
from distributed_training.bench.figures import Figure, PartResult, Plot

_SHARE = 3.2  # inches of height for a panel of few bars


def draw_plot(part: PartResult, plot: Plot, theme: Theme) -> bytes | None:
    """One plot; None where there is nothing to draw."""
    cases = _cases(part, plot)
    if not cases:
        return None
    return _lines(part, plot, cases, theme) if plot.kind == "lines" else _bars(part, plot, cases, theme)


def _cases(part: PartResult, plot: Plot) -> dict[str, list[Figure]]:
    cases: dict[str, list[Figure]] = {}
    for (case, quantity), group in part.groups().items():
        fit = [f for f in group if _height(part, plot, f) is not None and (plot.kind == "bars" or f.x is not None)]
        if quantity == plot.quantity and fit:
            cases[case] = fit
    return cases


def _height(part: PartResult, plot: Plot, figure: Figure) -> float | None:
    """What is drawn for a figure: its value, or its ratio to the reference."""
    if plot.show == "values":
        return figure.median
    if figure.reference == figure.variant:
        return 1.0
    found = part.comparison(figure)
    return found.median if found is not None else None


def _error(part: PartResult, plot: Plot, figure: Figure) -> float:
    """Half the distance between the quartiles, in the unit of the axis."""
    found = part.comparison(figure) if plot.show == "ratios" else None
    spread = found.spread if found is not None else 0.0 if plot.show == "ratios" else figure.spread
    return 0.5 * spread * (_height(part, plot, figure) or 0.0)


def _colors(theme: Theme) -> list[str]:
    return [theme.train, theme.val, theme.test, theme.other]


def _bars(part: PartResult, plot: Plot, cases: dict[str, list[Figure]], theme: Theme) -> bytes:
    """Horizontal bars, one panel for each case: names of variants stay readable however long they are."""
    most = max(len(group) for group in cases.values())
    columns = min(2, len(cases))
    rows = math.ceil(len(cases) / columns)
    width = WIDE[0] if columns > 1 or most > 5 else HALF[0]
    figure = new_figure(theme, (width, rows * max(_SHARE * 0.6, 0.38 * most + 1.1)))
    for place, (case, group) in enumerate(cases.items()):
        axes = figure.add_subplot(rows, columns, place + 1)
        frame(axes, f"{plot.title}: {case}" if case else plot.title, theme, _axis(plot, group))
        if len(cases) > 1:  # two whole titles beside each other would not fit
            words = plain_text(textwrap.fill(case, 52))
            axes.set_title(words, loc="left", color=theme.text, fontsize=10.5, fontweight="bold", pad=6)
        axes.grid(axis="y", visible=False)
        axes.grid(axis="x", color=theme.grid, linewidth=0.8)
        heights = [_height(part, plot, f) or 0.0 for f in group]
        colors = [theme.other if f.variant == f.reference else theme.train for f in group]
        style = {"error_kw": {"ecolor": theme.muted, "elinewidth": 1.2, "capsize": 2}}
        axes.barh(range(len(group)), heights, 0.66, color=colors, xerr=[_error(part, plot, f) for f in group], **style)
        axes.set_yticks(range(len(group)), [plain_text(f.variant) for f in group], color=theme.text)
        axes.invert_yaxis()
        axes.set_xlim(0, max(heights) * 1.22 or 1)
        for row, (height, one) in enumerate(zip(heights, group)):
            text = f"{height:.2f}" if plot.show == "ratios" else f"{height:,.0f}" if height >= 100 else f"{height:.3g}"
            at = height + _error(part, plot, one)
            axes.annotate(text, (at, row), (5, 0), textcoords="offset points", va="center", color=theme.text, size=9)
        if plot.show == "ratios":
            axes.axvline(1.0, color=theme.muted, linewidth=1, linestyle=(0, (3, 3)))
    if len(cases) > 1:
        figure.suptitle(plain_text(plot.title), x=0.01, ha="left", color=theme.text, fontsize=13, fontweight="bold")
    return png(figure, theme)


def _lines(part: PartResult, plot: Plot, cases: dict[str, list[Figure]], theme: Theme) -> bytes:
    """One line for each case over the same horizontal axis."""
    figure = new_figure(theme, HALF)
    axes = figure.add_subplot()
    first = next(iter(cases.values()))
    frame(axes, plot.title, theme, plot.xlabel)
    axes.set_ylabel(plain_text(_axis(plot, first)), color=theme.muted, fontsize=10)
    places = sorted({f.x for group in cases.values() for f in group if f.x is not None})
    styles = [("o", "-"), ("s", "-"), ("^", "-"), ("D", "-")]
    for color, (marker, line), (case, group) in zip(
        _cycle(_colors(theme), cases), _cycle(styles, cases), cases.items()
    ):
        group = sorted(group, key=lambda f: f.x or 0.0)
        xs, ys = [f.x for f in group], [_height(part, plot, f) or 0.0 for f in group]
        errors = [_error(part, plot, f) for f in group]
        style: dict[str, Any] = {"marker": marker, "linestyle": line, "linewidth": 1.9, "markersize": 5}
        axes.errorbar(xs, ys, yerr=errors, color=color, capsize=2, label=plain_text(case or plot.quantity), **style)
    _ideal(axes, plot, places, theme)
    if len(places) > 2 and places[0] > 0 and places[-1] / places[0] >= 8:
        axes.set_xscale("log", base=2)
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    legend(axes, theme)
    return png(figure, theme)


def _ideal(axes: Any, plot: Plot, places: Sequence[float], theme: Theme) -> None:
    if plot.ideal == "none" or not places:
        return
    heights = [place / places[0] for place in places] if plot.ideal == "linear" else [1.0 for _ in places]
    axes.plot(places, heights, color=theme.muted, linewidth=1.2, linestyle=(0, (4, 3)), label="ideal", zorder=1)


def _axis(plot: Plot, group: Sequence[Figure]) -> str:
    if plot.show == "values":
        return f"{plot.quantity}, {group[0].unit}" if group[0].unit else plot.quantity
    references = {f.reference for f in group if f.reference is not None}
    return f"{plot.quantity}, to {next(iter(references))}" if len(references) == 1 else f"{plot.quantity}, ratio"


def _cycle(values: Sequence[Any], cases: dict[str, list[Figure]]) -> list[Any]:
    return [values[number % len(values)] for number in range(len(cases))]
