"""`dtrain tune` told to end leaves what `HPORunner.resume` goes on with; what is refused before it starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.launching import environment
from tests.ray_nodes import Nodes

from distributed_training.config import Config
from distributed_training.launch.ray_cluster import connected
from distributed_training.runtime.errors import ConfigError
from distributed_training.tuning import HPORunner
from distributed_training.tuning.records import SearchFolder


@pytest.fixture(scope="module", autouse=True)
def _cluster(nodes: Nodes) -> Iterator[None]:
    Path(tempfile.gettempdir(), "_ray_lockfiles").mkdir(exist_ok=True)  # Ray makes it to restore a search, and keeps it
    with connected(nodes.address):
        yield


CONFIG = """
training: {epochs: 3, warmup_epochs: 0, schedule: constant, batch_size: 64}
model: {args: {hidden: [8]}}
data: {preprocess: "slow:wait"}
run: {root: runs, name: search, progress: plain}
tuning:
  scheduler: none
  algorithm: grid
  max_concurrent: 2
  share_feed: "off"
  space: {training.lr: [1.0e-2, 1.0e-5]}
"""
SLOW = """
import os, time


def wait(sample):
    time.sleep(0.0 if os.path.exists("quick") else 0.0005)
    return sample
"""


@pytest.mark.timeout(300)
def test_sigterm_ends_a_search_which_then_goes_on_from_python_to_what_it_would_have_been(
    nodes: Nodes, in_tmp: Path
) -> None:
    (in_tmp / "config.yaml").write_text(CONFIG)
    (in_tmp / "slow.py").write_text(SLOW)
    (temporary := in_tmp / "temporary").mkdir()
    command = [sys.executable, "-m", "distributed_training", "tune", "config.yaml", "--address", nodes.address]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    search = subprocess.Popen(command, env=environment(TMPDIR=str(temporary)), start_new_session=True, **pipes)
    folder = SearchFolder(in_tmp / "runs/search")
    try:
        end = time.monotonic() + 200
        while not any(trial.epoch for trial in folder.trials()):
            assert search.poll() is None, search.communicate()[0]
            assert time.monotonic() < end
            time.sleep(0.05)
        search.terminate()
        output, _ = search.communicate(timeout=90)
    finally:
        if search.poll() is None:
            os.killpg(search.pid, signal.SIGKILL)
            search.communicate()
    assert search.returncode == 128 + signal.SIGTERM, output
    assert "Search interrupted" in output
    assert "dtrain tune --resume runs/search" in output
    assert "SIGTERM received" not in output  # Ray's own report of a crash
    asked = json.loads(folder.search_file.read_text())
    assert (asked["status"], asked["signal"]) == ("interrupted", "SIGTERM")
    assert {trial.status for trial in folder.trials()} <= {"paused", "completed"}

    (in_tmp / "quick").touch()
    config = Config.from_file("config.yaml")
    analysis = HPORunner(config=config).resume("runs/search")
    assert len(analysis) == 2
    trials = folder.trials()
    assert [trial.status for trial in trials] == ["completed"] * 2
    assert [trial.epoch for trial in trials] == [3, 3]
    assert HPORunner.extract_best_config(analysis) == {"training.lr": 1e-2}
    assert Config.from_file(folder.best_file).training.lr == 1e-2
    assert folder.load().status == "completed"


def test_a_search_by_a_ray_client_and_odd_shares_of_gpus_are_refused(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = {"training.lr": {"uniform": [0.1, 0.2]}}
    with pytest.raises(ConfigError, match=r"ray://10\.0\.0\.1:10001: a search runs on a machine of the cluster"):
        HPORunner(root="runs").run_random_search(space, address="ray://10.0.0.1:10001")
    monkeypatch.setenv("RAY_ADDRESS", "ray://10.0.0.2:10001")
    with pytest.raises(ConfigError, match=r"ray job submit -- dtrain tune"):
        HPORunner(root="runs").run_random_search(space)
    with pytest.raises(ConfigError, match=r"1\.5 for each of tuning\.workers_per_trial=2"):
        HPORunner(root="runs").run_random_search(space, gpus_per_trial=3, workers_per_trial=2)
    assert not (in_tmp / "runs").exists()
