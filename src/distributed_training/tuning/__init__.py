"""Hyper-parameter search on Ray Tune: `HPORunner` in Python, `dtrain tune` on the command line.

Names are imported when they are first used: Ray is an extra.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed_training.tuning.reporting import report
    from distributed_training.tuning.runner import HPORunner
    from distributed_training.tuning.space import get_default_search_space

_HOME = {"HPORunner": "runner", "get_default_search_space": "space", "report": "reporting"}

__all__ = ["HPORunner", "get_default_search_space", "report"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
