"""`dtrain tune`: killed and resumed, a node lost on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tests.launching import environment
from tests.ray_nodes import Nodes

from distributed_training.config import Config, ConfigError
from distributed_training.runtime.run_directory import RunDirectory
from distributed_training.tuning import HPORunner
from distributed_training.tuning.records import SearchFolder, Trial

CONFIG = """
training: {epochs: 30, warmup_epochs: 0, schedule: constant, batch_size: 64}
model: {args: {hidden: [8]}}
data: {preprocess: "slow:wait"}
run: {root: runs, name: search, progress: plain}
tuning:
  scheduler: none
  algorithm: random
  samples: 4
  share_feed: "off"
  space: {training.lr: {loguniform: [1.0e-4, 1.0e-1]}, training.epochs: {choice: [1, 12, 12]}}
"""
SLOW = """
import os, pathlib, time

pathlib.Path(f"worker.{os.getpid()}").touch()


def wait(sample):
    time.sleep(0.0002)
    return sample
"""


@pytest.fixture
def tune(in_tmp: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    (temporary := in_tmp / "temporary").mkdir()  # what a killed program leaves there is no test's

    def start(*words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "distributed_training", "tune", *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(
            subprocess.Popen(command, env=environment(TMPDIR=str(temporary)), start_new_session=True, **pipes)
        )
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def wait_for(process: subprocess.Popen[str], reached: object) -> list[Trial]:
    folder, end = SearchFolder(Path("runs/search").absolute()), time.monotonic() + 240
    while True:
        trials = folder.trials()
        if reached(trials):  # type: ignore[operator]
            return trials
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, trials
        time.sleep(0.1)


@pytest.mark.timeout(600)
def test_a_search_survives_the_end_of_a_node_and_goes_on_after_that_of_its_driver(
    nodes: Nodes, in_tmp: Path, tune: Callable[..., subprocess.Popen[str]]
) -> None:
    (in_tmp / "config.yaml").write_text(CONFIG)
    (in_tmp / "slow.py").write_text(SLOW)
    first = tune("config.yaml", "--address", nodes.address, "--max-concurrent", "2", "--seed", "5")
    wait_for(first, lambda trials: any(t.status == "running" and (t.epoch or 0) >= 2 for t in trials))
    at_work = [int(file.suffix[1:]) for file in in_tmp.glob("worker.*")]
    nodes.kill_node_of(next(process for process in at_work if psutil.pid_exists(process)))
    nodes.add(2)
    before = wait_for(first, lambda trials: any(t.status == "completed" for t in trials) and _again(trials))
    time.sleep(6)  # Ray writes down its own state every five seconds
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    done = [t for t in before if t.status == "completed"]
    written = {t.id: RunDirectory(in_tmp / "runs/search" / t.directory).events_file.read_text() for t in done}
    second = tune("--resume", "runs/search")
    output, _ = second.communicate(timeout=240)
    assert second.returncode == 0, output
    trials = SearchFolder(in_tmp / "runs/search").trials()
    assert [t.status for t in trials] == ["completed"] * 4, output
    assert all(t.epoch == t.parameters["training.epochs"] for t in trials)
    for t in done:  # not run again
        assert RunDirectory(in_tmp / "runs/search" / t.directory).events_file.read_text() == written[t.id]
    assert any(trial.attempts > 1 for trial in trials)
    runs = [RunDirectory(in_tmp / "runs/search" / trial.directory) for trial in trials]
    starts = [event for run in runs for event in run.events() if event["event"] == "start"]
    assert any(event["resumed_from"] for event in starts)  # from a checkpoint, not from the beginning
    assert json.loads((in_tmp / "runs/search/search.json").read_text())["status"] == "completed"
    assert "best trial" in output
    other = Config.from_file("config.yaml").replace(**{"training.batch_size": 32})
    with pytest.raises(ConfigError, match=r"training\.batch_size was 64 and is 32"):
        HPORunner(config=other).resume("runs/search")


def _again(trials: list[Trial]) -> bool:
    """Whether a trial was started again and trains."""
    return any(t.attempts > 1 and t.status == "running" for t in trials)
