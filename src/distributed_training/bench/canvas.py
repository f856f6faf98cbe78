"""What all plots have in common: colours, frame, legend, and how a figure becomes a PNG.

Figures are drawn on their own Agg canvas and never through pyplot: no display, no global state, safe in any thread.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

from distributed_training.runtime.imports import require

WIDE = (10.5, 4.4)
HALF = (7.0, 3.9)


@dataclass(frozen=True)
class Theme:
    """The colours of one look. A split has the same colour in every plot."""

    background: str
    text: str
    muted: str
    grid: str
    train: str
    val: str
    test: str
    other: str


LIGHT = Theme("#ffffff", "#1f2937", "#6b7280", "#e5e7eb", "#2563eb", "#ea580c", "#059669", "#475569")
DARK = Theme("#161b22", "#e6edf3", "#9aa4b2", "#2d343e", "#6ea8fe", "#ffa657", "#56d39b", "#a5b4c8")


def new_figure(theme: Theme, size: tuple[float, float]) -> Any:
    """An empty figure of `size` inches."""
    require("matplotlib", "plots", "drawing the plots of a report")
    from matplotlib.figure import Figure

    return Figure(figsize=size, dpi=144, layout="constrained", facecolor=theme.background)


def png(figure: Any, theme: Theme) -> bytes:
    """A figure as the bytes of a PNG file."""
    image = io.BytesIO()
    figure.savefig(image, format="png", facecolor=theme.background)
    return image.getvalue()


def frame(axes: Any, title: str, theme: Theme, xlabel: str = "") -> None:
    """Title, quiet ticks and horizontal lines in place of a box."""
    axes.set_facecolor(theme.background)
    axes.set_title(plain_text(title), loc="left", color=theme.text, fontsize=13, fontweight="bold", pad=6)
    axes.set_xlabel(plain_text(xlabel), color=theme.muted, fontsize=10)
    axes.tick_params(colors=theme.muted, labelsize=9, length=0, which="both")
    axes.grid(axis="y", color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(theme.grid)
    axes.margins(x=0.015, y=0.08)


def whole_numbers(axis: Any) -> None:
    """Ticks of an axis that counts: whole numbers, thousands apart."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    axis.set_major_locator(MaxNLocator(nbins=8, integer=True, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def legend(axes: Any, theme: Theme, **options: Any) -> None:
    """A legend where there is more than one thing to tell apart; equal labels once."""
    handles: dict[str, Any] = {}
    for handle, label in zip(*axes.get_legend_handles_labels()):
        handles.setdefault(label, handle)
    if len(handles) > 1:
        options = {"loc": "best", **options}
        made = axes.legend(
            handles.values(), handles.keys(), fontsize=9, labelcolor=theme.text, framealpha=0.85, **options
        )
        made.get_frame().set(facecolor=theme.background, edgecolor="none")


def legend_above(axes: Any, theme: Theme) -> None:
    """A legend in the line of the title, for plots whose points are everywhere."""
    legend(axes, theme, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=4, borderaxespad=0.1, columnspacing=1.4)


def plain_text(text: str) -> str:
    """Text that matplotlib shows as it is: a dollar sign would begin a formula."""
    return text.replace("$", r"\$")
