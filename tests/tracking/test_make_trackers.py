"""Trackers by name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from distributed_training.config import ConfigError, TrackingConfig
from distributed_training.runtime.errors import MissingDependencyError
from distributed_training.tracking import TRACKERS, make_trackers


def names(trackers: list[str], rank: int = 0) -> list[str]:
    return [type(t).__name__ for t in make_trackers(TrackingConfig(trackers=trackers), rank).active]


def test_jsonl_is_always_there_and_first() -> None:
    assert names([]) == ["JsonlTracker"]
    assert names(["tensorboard", "wandb"]) == ["JsonlTracker", "TensorBoardTracker", "WandbTracker"]


def test_a_name_given_twice_counts_once() -> None:
    assert names(["tensorboard", "jsonl", "tensorboard"]) == ["JsonlTracker", "TensorBoardTracker"]


def test_other_ranks_have_none() -> None:
    assert names(["tensorboard"], rank=1) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_an_unknown_name_is_refused_with_the_nearest(rank: int) -> None:
    with pytest.raises(ConfigError, match=r"unknown tracker 'tensorbord'; did you mean tensorboard\?"):
        names(["tensorbord"], rank)
    with pytest.raises(ConfigError, match="known are jsonl, tensorboard, wandb"):
        names(["mlflow"], rank)


@pytest.mark.parametrize("library", ["tensorboard", "wandb"])
def test_a_missing_library_is_told_before_training(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingDependencyError, match=rf"distributed-training\[{library}\]"):
        names([library])


def test_nothing_is_imported_that_was_not_named() -> None:
    code = "import sys, distributed_training.tracking; print({'torch', 'wandb', 'tensorboard'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


def test_every_registered_name_can_be_made() -> None:
    assert len(names(list(TRACKERS))) == len(TRACKERS)
