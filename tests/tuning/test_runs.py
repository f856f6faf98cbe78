"""Searches over ordinary runs: their folders and checkpoints, ends by ASHA, exchange by PBT, several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.ray_nodes import Nodes

from distributed_training.checkpoint import find_checkpoint
from distributed_training.config import Config
from distributed_training.runtime.run_directory import RunDirectory
from distributed_training.training.job import build_job
from distributed_training.tuning import HPORunner
from distributed_training.tuning.records import SearchFolder

SETTINGS = {
    "training": {"epochs": 4, "warmup_epochs": 0, "schedule": "constant", "batch_size": 256},
    "model": {"args": {"hidden": [8]}},
    "checkpoint": {"monitor": "val_loss", "mode": "min"},
    "run": {"root": "runs", "progress": "off"},
}


@pytest.fixture(scope="module", autouse=True)
def _cluster(nodes: Nodes) -> Any:
    from distributed_training.launch.ray_cluster import connected

    with connected(nodes.address):
        yield


def statuses(run: RunDirectory) -> list[str]:
    return [event["status"] for event in run.events() if event["event"] == "finish"]


def test_trials_are_runs_and_asha_ends_bad_ones_with_a_checkpoint(in_tmp: Path) -> None:
    runner = HPORunner(None, SETTINGS, name="search")
    rates = [1e-2, 3e-3, 1e-6, 1e-7]
    analysis = runner.run_grid_search({"training.lr": {"choice": rates}}, max_concurrent=1, reduction=2)
    folder = SearchFolder(in_tmp / "runs/search")
    records = {trial.parameters["training.lr"]: trial for trial in folder.trials()}
    assert [records[rate].status for rate in rates] == ["completed", "stopped", "stopped", "stopped"]
    for trial in records.values():
        run = RunDirectory(folder.path / trial.directory)
        assert run.load_config().training.lr == trial.parameters["training.lr"]
        assert run.load_config().tracking.group == "search"
        assert statuses(run)[-1] == ("completed" if trial.status == "completed" else "stopped early")
        assert find_checkpoint(run.path).epoch == trial.epoch  # it can go on from where it was ended
    assert HPORunner.extract_best_config(analysis) == {"training.lr": 1e-2}
    best = Config.from_file(folder.best_file)
    assert (best.training.lr, best.training.epochs, best.run.name) == (1e-2, 4, None)
    with build_job(best, in_tmp / "again") as job:
        job.train()
    finish = list(RunDirectory(in_tmp / "again").events())[-1]
    assert finish["val_loss"] == pytest.approx(records[1e-2].last["val_loss"], rel=1e-5)  # the trial once more
    assert (folder.report / "index.html").is_file()


def test_a_population_takes_over_weights_of_better_ones(in_tmp: Path) -> None:
    settings = {**SETTINGS, "training": {**SETTINGS["training"], "epochs": 3}}
    runner = HPORunner("dtrain", settings, name="population")
    space = {"training.lr": {"loguniform": [1e-8, 1e-1]}, "training.weight_decay": {"choice": [0.0, 0.1]}}
    analysis = runner.run_population_based(space, num_samples=3, perturb_epochs=1, max_concurrent=3, seed=3)
    assert len(analysis) == 3
    assert not analysis.errors
    forks = sorted((in_tmp / "runs/population/trials").glob("*+*"))
    assert forks, "nobody took over anything"
    for fork in forks:
        run = RunDirectory(fork)
        starts = [event for event in run.events() if event["event"] == "start"]
        assert starts[0]["resumed_from"] > 0
    trials = SearchFolder(in_tmp / "runs/population").trials()
    assert {trial.status for trial in trials} == {"completed"}
    assert all(trial.epoch == 3 for trial in trials)


def test_trials_of_two_ranks(in_tmp: Path) -> None:
    settings = {**SETTINGS, "strategy": "ddp", "training": {**SETTINGS["training"], "epochs": 2}}
    runner = HPORunner("dtrain", settings, name="ranks")
    analysis = runner.run_grid_search({"training.lr": [1e-2]}, workers_per_trial=2, grace_epochs=2)
    assert not analysis.errors
    assert HPORunner.extract_best_config(analysis) == {"training.lr": 1e-2}
    for trial in SearchFolder(in_tmp / "runs/ranks").trials():
        run = RunDirectory(in_tmp / "runs/ranks" / trial.directory)
        start = next(event for event in run.events() if event["event"] == "start")
        assert start["facts"]["strategy"] == "ddp"
        assert trial.epoch == 2
