"""Searches over functions of the user's own, on a real cluster: results, seeds, failures, mistakes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.ray_nodes import Nodes
from tests.tuning import functions

from distributed_training.config import ConfigError
from distributed_training.runtime.errors import MissingDependencyError, RanksError, RunDirectoryError, SearchError
from distributed_training.tuning import HPORunner
from distributed_training.tuning.records import SearchFolder, Trial

SPACE = {"x": {"uniform": [0.0, 1.0]}, "y": {"int": [1, 4]}}


@pytest.fixture(scope="module", autouse=True)
def _cluster(nodes: Nodes) -> Any:
    import ray

    from distributed_training.launch.ray_cluster import connected

    with connected(nodes.address):
        yield ray


def trials_of(runner: HPORunner) -> list[Trial]:
    assert runner.folder is not None
    return SearchFolder(runner.folder).trials()


def test_a_bayesian_search_finds_the_bottom_and_gives_rays_own_results(in_tmp: Path) -> None:
    from ray.tune import ResultGrid

    runner = HPORunner(functions.bowl, {}, metric="loss", mode="min", name="bowl", root="runs")
    analysis = runner.run_bayesian_search(SPACE, num_samples=10, max_concurrent=1, seed=1)
    assert isinstance(analysis, ResultGrid)
    assert len(analysis) == 10
    best = HPORunner.extract_best_config(analysis)
    assert best == analysis.get_best_result(scope="all").config
    assert best["y"] == 2
    frame = analysis.get_dataframe()
    assert {"config/x", "loss", "cost"} <= set(frame.columns)
    records = trials_of(runner)
    assert [trial.id for trial in records] == [f"{n:04}" for n in range(1, 11)]
    assert min(t.best["loss"] for t in records) == pytest.approx(analysis.get_best_result(scope="all").metrics["loss"])
    assert {t.status for t in records} <= {"completed", "stopped"}
    again = HPORunner(functions.bowl, {}, metric="loss", mode="min", name="again", root="runs")
    again.run_bayesian_search(SPACE, num_samples=4, max_concurrent=1, seed=1)
    assert [t.parameters for t in trials_of(again)] == [t.parameters for t in records[:4]]


def test_a_grid_of_a_function_that_returns_its_metrics_and_is_not_overwritten(in_tmp: Path) -> None:
    runner = HPORunner(functions.returns, {"width": 3}, name="grid", root="runs")
    analysis = runner.run_grid_search({"training.lr": {"choice": [0.1, 0.01, 1.0]}, "width": [1, 2]}, scheduler="none")
    assert HPORunner.extract_best_config(analysis)["training.lr"] == 0.01
    assert len(analysis) == 6
    assert {t.status for t in trials_of(runner)} == {"completed"}
    with pytest.raises(RunDirectoryError, match="exists; go on with --resume"):
        runner.run_grid_search({"width": [1, 2]})


def test_trials_that_fail_are_tried_again_then_recorded_and_the_search_goes_on(in_tmp: Path) -> None:
    runner = HPORunner(functions.unlucky, {"folder": str(in_tmp)}, metric="score", root="runs")
    analysis = runner.run_grid_search({"x": [0, 1, 2, 3]}, scheduler="none")
    records = {t.parameters["x"]: t for t in trials_of(runner)}
    assert [records[x].status for x in range(4)] == ["completed", "completed", "failed", "completed"]
    assert [records[x].attempts for x in range(4)] == [1, 2, 2, 2]
    assert "no luck with 2" in records[2].error
    assert HPORunner.extract_best_config(analysis)["x"] == 3
    assert analysis.num_errors == 1


def test_a_search_of_which_all_trials_fail_quotes_the_first(in_tmp: Path) -> None:
    runner = HPORunner(functions.unlucky, {"folder": str(in_tmp)}, metric="score", name="bad", root="runs")
    with pytest.raises(SearchError, match=r"all 2 trials failed; the first \(0001, x=2\).*no luck with 2"):
        runner.run_random_search({"x": [2]}, num_samples=2, retries=0)
    assert json.loads((in_tmp / "runs/bad/search.json").read_text())["status"] == "failed"


def test_several_objectives(in_tmp: Path) -> None:
    runner = HPORunner(functions.bowl, {}, metric=["loss", "cost"], mode=["min", "min"], root="runs")
    analysis = runner.run_bayesian_search(SPACE, num_samples=4, scheduler="none")
    assert all({"loss", "cost"} <= set(result.metrics) for result in analysis)


def test_a_metric_that_is_never_reported_ends_the_search_within_the_first_trial(in_tmp: Path) -> None:
    runner = HPORunner(functions.speaks_of_others, {}, metric="val_loss", root="runs")
    with pytest.raises(ConfigError, match=r"val_loss: never reported.*reported were accuracy, depth"):
        runner.run_bayesian_search(SPACE, num_samples=50, max_concurrent=1)
    with pytest.raises(ConfigError, match="had reported nothing"):
        HPORunner(functions.says_nothing, {}, root="runs").run_random_search(SPACE, num_samples=50, max_concurrent=1)


def test_what_cannot_be_is_refused_before_anything_starts(in_tmp: Path) -> None:
    runner = HPORunner("dtrain", {}, root="runs")
    with pytest.raises(RanksError, match=r"room for 0 on 3 nodes.*one trial needs 64 CPU.*cpus_per_worker"):
        runner.run_random_search({"training.lr": {"uniform": [0.1, 0.2]}}, cpus_per_worker=64)
    with pytest.raises(RanksError, match="one trial needs 6 CPU"):
        runner.run_random_search({"training.lr": {"uniform": [0.1, 0.2]}}, workers_per_trial=6)
    with pytest.raises(ConfigError, match=r"did you mean training\.lr"):
        runner.run_random_search({"training.lrr": {"uniform": [0.1, 0.2]}})
    with pytest.raises(ConfigError, match="did you mean max_concurrent"):
        runner.run_random_search({"training.lr": {"uniform": [0.1, 0.2]}}, max_concurent=2)
    with pytest.raises(ConfigError, match="must be a function"):
        HPORunner("train.py")
    assert not (in_tmp / "runs").exists()


def test_without_ray_it_says_what_to_install(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependencyError, match=r"needs ray.*distributed-training\[ray\]"):
        HPORunner().run_random_search({"training.lr": {"uniform": [0.1, 0.2]}})
