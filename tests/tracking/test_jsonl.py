"""The record in events.jsonl: valid JSON whatever happens, and at most one line lost by a crash."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.contract.tracker import Points, TrackerContract, run_info

from distributed_training.runtime.run_directory import RunDirectory
from distributed_training.tracking.jsonl import JsonlTracker


def lines(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]


def jsonl_points(directory: Path) -> Points:
    points: Points = {}
    for event in RunDirectory(directory).events():
        if event["event"] == "metrics":
            for name in set(event) - {"event", "time", "step"}:
                points.setdefault(name, []).append((event["step"], event[name]))
    return points


class TestJsonlTracker(TrackerContract):
    def make(self) -> JsonlTracker:
        return JsonlTracker()

    def points(self, directory: Path) -> Points:
        return jsonl_points(directory)

    def test_the_lines(self, run_directory: Path) -> None:
        tracker = self.make()
        before = time.time()
        tracker.start(run_info(run_directory))
        tracker.log({"train_loss": 0.5, "epoch": 1}, step=10)
        tracker.checkpoint(run_directory / "checkpoints" / "step-10", 10, {"val_loss": 0.25})
        tracker.checkpoint(Path("/elsewhere/step-10"), 10, {})
        tracker.finish("stopped early", {"val_loss": 0.25})
        events = lines(run_directory)
        assert all(before - 1 <= event.pop("time") <= time.time() + 1 for event in events)
        assert events == [
            {
                "event": "start",
                "name": "mlp-digits",
                "resumed_from": None,
                "facts": {"host": "node-1", "torch": "2.13", "parameters": 1234, "gpus": [], "path": None},
            },
            {"event": "metrics", "step": 10, "train_loss": 0.5, "epoch": 1},
            {"event": "checkpoint", "step": 10, "path": "checkpoints/step-10", "val_loss": 0.25},
            {"event": "checkpoint", "step": 10, "path": "/elsewhere/step-10"},
            {"event": "finish", "status": "stopped early", "val_loss": 0.25},
        ]

    def test_not_finite_is_null(self, run_directory: Path) -> None:
        tracker = self.make()
        tracker.start(run_info(run_directory))
        tracker.log({"a": float("nan"), "b": float("-inf"), "c": np.float32("nan"), "d": torch.tensor(np.inf)}, step=1)
        tracker.finish("failed", {"e": float("nan")})
        _, metrics, finish = lines(run_directory)
        assert [metrics[name] for name in "abcd"] == [None] * 4
        assert finish["e"] is None

    def test_values_of_other_libraries(self, run_directory: Path) -> None:
        tracker = self.make()
        tracker.start(run_info(run_directory))
        odd = {
            "a": np.float64(0.5),
            "b": np.int64(3),
            "c": torch.tensor(1.5),
            "d": np.zeros(2),
            "e": Path("x"),
            "f": (1, 2),
        }
        tracker.log(odd, step=1)  # type: ignore[arg-type]
        tracker.finish("completed", {})
        metrics = lines(run_directory)[1]
        assert [metrics[name] for name in "abcef"] == [0.5, 3, 1.5, "x", [1, 2]]

    def test_a_metric_cannot_replace_what_the_line_is(self, run_directory: Path) -> None:
        tracker = self.make()
        tracker.start(run_info(run_directory))
        tracker.log({"event": 1.0, "step": 99.0, "time": 0.0, "loss": 1.0}, step=5)
        tracker.finish("completed", {})
        event = lines(run_directory)[1]
        assert (event["event"], event["step"], event["loss"]) == ("metrics", 5, 1.0)
        assert event["time"] > 0

    def test_a_line_cut_off_by_a_crash_costs_only_itself(self, run_directory: Path) -> None:
        (run_directory / "events.jsonl").write_bytes(
            b'{"event": "metrics", "step": 1, "train_loss": 1.0}\n{"event": "met'
        )
        tracker = self.make()
        tracker.start(run_info(run_directory, resumed_from=1))
        tracker.log({"train_loss": 0.5}, step=2)
        tracker.finish("completed", {})
        kinds = [event["event"] for event in RunDirectory(run_directory).events()]
        assert kinds == ["metrics", "start", "metrics", "finish"]

    def test_a_call_before_start_says_so(self) -> None:
        with pytest.raises(RuntimeError, match="start"):
            self.make().log({"a": 1.0}, step=1)

    def test_finish_without_start_is_harmless(self) -> None:
        self.make().finish("failed", {})


def test_a_killed_process_loses_nothing_that_was_logged(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from distributed_training.tracking import RunInfo
from distributed_training.tracking.jsonl import JsonlTracker
tracker = JsonlTracker()
tracker.start(RunInfo(name="r", directory=Path({str(tmp_path)!r}), config={{}}))
for step in range(100):
    tracker.log({{"train_loss": step / 2}}, step)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert [event["step"] for event in lines(tmp_path)[1:]] == list(range(100))
