"""Events read back as series: one piece, however often the run was interrupted."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tests.contract.tracker import run_info

from distributed_training.bench import Series, load_history
from distributed_training.runtime.errors import RunDirectoryError
from distributed_training.runtime.run_directory import RunDirectory
from distributed_training.tracking.jsonl import JsonlTracker


def write(path: Path, *events: Any, tail: str = "") -> RunDirectory:
    """A run directory with these events; a time is added to each."""
    lines = [json.dumps({"time": 1000.0 + n, **e} if isinstance(e, dict) else e) for n, e in enumerate(events)]
    (path / "events.jsonl").write_text("\n".join(lines) + "\n" + tail)
    return RunDirectory(path)


def start(resumed_from: int | None = None, **facts: Any) -> dict[str, Any]:
    return {"event": "start", "name": "r", "resumed_from": resumed_from, "facts": facts}


def metrics(step: int, **values: float | None) -> dict[str, Any]:
    return {"event": "metrics", "step": step, **values}


def test_series_status_summary_and_facts(tmp_path: Path) -> None:
    run = write(
        tmp_path,
        start(host="a"),
        metrics(10, train_loss=2.0, lr=0.1),
        metrics(20, train_loss=1.0, lr=0.05),
        metrics(20, val_loss=1.5),
        {"event": "checkpoint", "step": 20, "path": "x", "val_loss": 1.5},
        {"event": "finish", "status": "completed", "val_loss": 1.5, "seconds": 9.0},
    )
    history = load_history(run)
    assert history.series["train_loss"] == Series([10, 20], [2.0, 1.0])
    assert history.series["val_loss"] == Series([20], [1.5])
    assert set(history.series) == {"train_loss", "lr", "val_loss"}
    assert (history.status, history.summary, history.facts) == (
        "completed",
        {"val_loss": 1.5, "seconds": 9.0},
        {"host": "a"},
    )
    assert (history.started, history.ended, history.last_step) == (1000.0, 1005.0, 20)


def test_after_a_resume_no_curve_overlaps_itself(tmp_path: Path) -> None:
    run = write(
        tmp_path,
        start(host="old"),
        *(metrics(step, train_loss=1.0) for step in (10, 20, 30, 40)),
        metrics(35, late=1.0),
        {"event": "finish", "status": "interrupted", "train_loss": 1.0},
        start(20, host="new"),
        *(metrics(step, train_loss=0.5) for step in (30, 40, 50)),
    )
    history = load_history(run)
    assert history.series["train_loss"] == Series([10, 20, 30, 40, 50], [1.0, 1.0, 0.5, 0.5, 0.5])
    assert "late" not in history.series
    assert history.resumed_at == [20]
    assert history.facts == {"host": "new"}
    assert (history.status, history.summary) == (None, {})  # it goes on: the earlier end does not count


def test_a_resume_further_back_undoes_a_later_one(tmp_path: Path) -> None:
    run = write(tmp_path, start(), metrics(10, a=1.0), start(10), metrics(20, a=2.0), start(5), metrics(10, a=3.0))
    history = load_history(run)
    assert history.resumed_at == [5]
    assert history.series["a"] == Series([10], [3.0])


def test_a_fresh_start_in_the_same_folder_forgets_the_earlier_try(tmp_path: Path) -> None:
    run = write(tmp_path, start(), metrics(0, a=9.0), metrics(10, a=1.0), start(), metrics(1, a=2.0))
    history = load_history(run)
    assert history.series["a"] == Series([1], [2.0])
    assert history.started == 1003.0


def test_what_is_not_finite_becomes_nan(tmp_path: Path) -> None:
    history = load_history(write(tmp_path, start(), metrics(1, a=None), metrics(2, a=4.0), metrics(3, a=2.0)))
    series = history.series["a"]
    assert math.isnan(series.values[0])
    assert series.finite() == [(2, 4.0), (3, 2.0)]
    assert (series.best("min"), series.best("max"), series.last) == ((3, 2.0), (2, 4.0), 2.0)
    assert Series([1], [math.nan]).best("min") is None


def test_damaged_and_foreign_lines_are_skipped(tmp_path: Path) -> None:
    odd = {"event": "metrics", "step": "x", "a": 1.0}
    run = write(
        tmp_path, start(), 3, ["event"], {"no": "event"}, odd, metrics(1, a=1.0, b=True, c="x"), tail='{"event": "me'
    )
    assert set(load_history(run).series) == {"a"}


def test_it_reads_what_the_tracker_writes(tmp_path: Path) -> None:
    tracker = JsonlTracker()
    tracker.start(run_info(tmp_path))
    tracker.log({"train_loss": 0.5, "epoch": 1}, 3)
    tracker.finish("failed", {"train_loss": float("inf")})
    history = load_history(RunDirectory(tmp_path))
    assert history.series["train_loss"] == Series([3], [0.5])
    assert history.status == "failed"
    assert math.isnan(history.summary["train_loss"])


@pytest.mark.parametrize("content", [None, "", '{"event": "sta'])
def test_no_events_is_an_error_that_says_so(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "events.jsonl").write_text(content)
    with pytest.raises(RunDirectoryError, match="no events"):
        load_history(RunDirectory(tmp_path))
