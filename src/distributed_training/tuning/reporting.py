"""What a trial reports: the words that both sides know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EPOCH, SECONDS, DIRECTORY = "epoch", "seconds", "run_directory"
DONE = "done"
"""Ray's word for a trial's last report."""


def report(metrics: Mapping[str, Any], checkpoint: Any = None) -> None:
    """For a function of your own: metrics of a trial so far, once an epoch or as often as you like.

        def train_fn(config):
            for epoch in range(10):
                report({"val_loss": ...})

    The same as Ray's `tune.report`. It does not return if the search ends the trial here.
    """
    from ray import tune

    tune.report(dict(metrics), checkpoint=checkpoint)


def missing(objectives: Mapping[str, str], metrics: Mapping[str, Any]) -> list[str]:
    """Objectives that are not among the metrics."""
    return [name for name in objectives if name not in metrics]


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a report that are numbers, without those that Ray adds for itself."""
    found = {}
    for name, value in metrics.items():
        if name in _OF_RAY or isinstance(value, (str, bool)):
            continue
        try:
            found[name] = float(value)
        except (TypeError, ValueError):
            continue
    return found


_OF_RAY = {
    "timestamp",
    "time_this_iter_s",
    "time_total_s",
    "time_since_restore",
    "iterations_since_restore",
    "training_iteration",
    "pid",
    "checkpoint_dir_name",
    "should_checkpoint",
    "done",
}
