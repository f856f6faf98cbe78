"""Trials on parts of a GPU. Ray gives out what a node says that it has, so that no GPU is needed to see how."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.ray_nodes import Nodes
from tests.tuning import functions

from distributed_training.launch.ray_cluster import connected
from distributed_training.tuning import HPORunner


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    with Nodes(1, gpus=1) as cluster, connected(cluster.address):
        yield


def test_two_trials_share_a_gpu_at_a_time(in_tmp: Path) -> None:
    runner = HPORunner(functions.half_a_gpu, {"folder": str(in_tmp)}, metric="loss", mode="min", root="runs")
    analysis = runner.run_grid_search({"x": [1, 2]}, gpus_per_trial=0.5, cpus_per_worker=0.5, scheduler="none")
    assert not analysis.errors
    assert [result.metrics["gpu"] for result in analysis] == [0, 0]
