"""Measuring: what became of a run (history, plots, one page), and the parts of `dtrain bench` with their report.

Names are imported when they are first used: the command line knows the parts and must stay quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed_training.bench.figures import BenchReport, Figure, PartResult
    from distributed_training.bench.history import History, Series, load_history
    from distributed_training.bench.options import BenchOptions
    from distributed_training.bench.records import read_report
    from distributed_training.bench.report import write_report
    from distributed_training.bench.suite import run_parts

_HOME = {
    "BenchOptions": "options",
    "BenchReport": "figures",
    "Figure": "figures",
    "History": "history",
    "PartResult": "figures",
    "Series": "history",
    "load_history": "history",
    "read_report": "records",
    "run_parts": "suite",
    "write_report": "report",
}

__all__ = [
    "BenchOptions",
    "BenchReport",
    "Figure",
    "History",
    "PartResult",
    "Series",
    "load_history",
    "read_report",
    "run_parts",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
