"""Small reports for tests."""

from __future__ import annotations

from typing import Any

from distributed_training.bench.figures import BenchReport, Figure, PartResult, Plot


def figure(variant: str, values: list[float], **changes: Any) -> Figure:
    """Throughput of scaling, compared with one process."""
    common: dict[str, Any] = {
        "part": "scaling",
        "case": "weak scaling, mlp",
        "quantity": "throughput",
        "unit": "samples/s",
        "reference": "1 process",
        "x": float(variant.split()[0]) if variant[0].isdigit() else None,
    }
    return Figure(variant=variant, values=values, **{**common, **changes})


def a_part(*figures: Figure, **changes: Any) -> PartResult:
    """A part of these figures, with a plot of lines and one of bars."""
    plots = [
        Plot(title="Speed-up", quantity="throughput", kind="lines", xlabel="processes", ideal="linear"),
        Plot(title="By variant", quantity="throughput", show="values"),
    ]
    common: dict[str, Any] = {"name": "scaling", "title": "Scaling", "about": "How it scales.", "plots": plots}
    return PartResult(figures=list(figures), **{**common, **changes})


def a_report(*parts: PartResult, **machine: Any) -> BenchReport:
    """A report of a machine of two cores, unless told otherwise."""
    return BenchReport(
        machine={"cpu": "a processor", "cores": 2, **machine},
        versions={"torch": "2.13.0", "python": "3.11.7"},
        created="2026-01-01T00:00:00Z",
        command="dtrain bench scaling",
        parts=list(parts),
    )
