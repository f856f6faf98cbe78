"""How trials leave their workers: asked again where they did not listen, and left behind where they cannot end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.ray_nodes import Nodes
from tests.tuning import functions

from distributed_training.launch.ray_cluster import connected
from distributed_training.tuning import HPORunner, ending
from distributed_training.tuning.records import SearchFolder


@pytest.fixture(scope="module", autouse=True)
def _cluster(nodes: Nodes) -> Iterator[None]:
    with connected(nodes.address):
        yield


def test_a_trial_that_reports_on_after_its_end_does_not_stop_the_search(in_tmp: Path) -> None:
    runner = HPORunner(functions.stubborn, {}, metric="loss", mode="min", root="runs", name="search")
    analysis = runner.run_grid_search({"x": [1, 2, 3, 4]}, max_concurrent=1, reduction=2)
    assert not analysis.errors
    trials = SearchFolder(in_tmp / "runs/search").trials()
    assert [trial.status for trial in trials] == ["completed", "stopped", "stopped", "stopped"]
    assert [trial.last["loss"] for trial in trials] == [2, 5, 6, 7]  # nothing of what was reported too late
    assert HPORunner.extract_best_config(analysis) == {"x": 1}


def test_a_thread_that_does_not_end_is_left_to_itself_and_not_heard(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray import tune
    from ray.train._internal.storage import StorageContext
    from ray.tune.trainable.function_trainable import wrap_function

    monkeypatch.setattr(ending, "SAVING", 0.3)
    monkeypatch.setenv("TUNE_ORIG_WORKING_DIR", str(in_tmp))
    monkeypatch.setenv("RAY_CHDIR_TO_TRIAL_DIR", "0")
    go_on, ended = threading.Event(), threading.Event()

    def trial(config: dict[str, Any]) -> None:
        try:
            tune.report({"x": config["x"]})
        finally:
            if config["x"] == 1:
                go_on.wait(60)  # as a long call would
                ended.set()
                tune.report({"x": 100})

    trial.__mixins__ = (ending.EndsInPeace,)  # type: ignore[attr-defined]
    places = [StorageContext(str(in_tmp), "search", trial_dir_name=name) for name in ("one", "two")]
    worker = wrap_function(trial)(config={"x": 1}, storage=places[0])
    assert worker.train()["x"] == 1
    assert worker.reset({"x": 2}, storage=places[1]) is True
    assert worker.train()["x"] == 2
    go_on.set()
    assert ended.wait(60)
    assert worker.train()["__duplicate__"] is True  # the second trial's own end
    worker.stop()
    end = time.monotonic() + 10
    while ending._abandoned and any(thread.is_alive() for thread in ending._abandoned):
        assert time.monotonic() < end
        time.sleep(0.02)
