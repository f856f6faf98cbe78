"""`dtrain feed --ray`: loader workers on the nodes of a real Ray cluster, one of which is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.launching import environment, free_port
from tests.ray_nodes import Nodes
from tests.split.conftest import Start, assert_same, train_here, wait_for, weights_of
from typer.testing import CliRunner

from distributed_training.cli.main import app
from distributed_training.runtime.run_directory import RunDirectory
from distributed_training.verify.audit import audit

COMMON = ["training.device=cpu", "run.progress=plain", "data.preprocess=loading:slowly", "training.epochs=4"]
LOADING = """
import os, time
from pathlib import Path

def slowly(sample, rng):
    Path(f"loader-{os.getpid()}").touch()
    if not Path("hurry").exists():
        time.sleep(0.05 if Path("hold").exists() else 0.002)
    image, label = sample
    return image + float(rng.normal()), label
"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with Nodes(1, 1) as cluster:
        yield cluster


def processes(folder: Path) -> set[int]:
    """Those that have loaded a sample."""
    return {int(path.name.partition("-")[2]) for path in folder.glob("loader-*")}


@pytest.mark.timeout(300)
def test_a_node_is_killed_and_the_training_is_that_of_one_machine(nodes: Nodes, start: Start, in_tmp: Path) -> None:
    (in_tmp / "loading.py").write_text(LOADING, encoding="utf-8")
    own = [*COMMON, f"network.port={free_port()}", "run.name=fed"]
    ray = ["--ray", "--address", nodes.address, "--loaders", "2"]
    server, loader = start(["serve", *own], ["feed", *own, *ray])
    server.until("epoch 1/4")
    wait_for(lambda: len(processes(in_tmp)) >= 2, lambda: f"{server.screen}\n{loader.screen}")
    first = processes(in_tmp)
    (in_tmp / "hold").touch()  # or the training would be over before Ray knows that the node is gone
    nodes.kill_node_of(min(first))
    loader.until("is lost; placing it anew")
    nodes.add(1)
    wait_for(lambda: processes(in_tmp) - first, lambda: f"{server.screen}\n{loader.screen}")
    assert server.alive, "it was too quick"
    (in_tmp / "hurry").touch()
    assert "Training completed (4 epochs, 92 steps" in server.end()
    assert "2 workers spent" in loader.end()

    train_here(*COMMON, "run.name=here")
    assert_same(weights_of("runs/fed"), weights_of("runs/here"))
    assert audit(RunDirectory(Path("runs/fed"))).problem == ""


@pytest.mark.timeout(300)
def test_mistakes_are_named_and_ctrl_c_ends_all(nodes: Nodes, start: Start, in_tmp: Path) -> None:
    (in_tmp / "loading.py").write_text(LOADING, encoding="utf-8")
    (in_tmp / "hurry").touch()
    own, ray = [*COMMON, f"network.port={free_port()}"], ["--ray", "--address", nodes.address, "--loaders", "1"]
    wrong, waiting, server = start(
        ["feed", *own, "data.preprocess=loading:nothing", *ray],
        ["feed", *own, *ray],
        ["serve", *own, "training.epochs=1000", "run.name=ended"],
    )
    assert "loading has no nothing" in " ".join(wrong.end().split())
    server.until("epoch 2/1000")
    waiting.signal(signal.SIGINT)
    waiting.end()
    server.until("no loader is connected")
    server.signal(signal.SIGTERM)
    assert "Interrupted" in server.end()


@pytest.mark.timeout(180)
def test_the_feed_of_a_search_runs_on_nodes_elsewhere(nodes: Nodes, in_tmp: Path) -> None:
    (in_tmp / "loading.py").write_text(LOADING, encoding="utf-8")
    command = [sys.executable, str(Path(__file__).parent / "ray_services.py"), nodes.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment())
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--loaders", "2"], "--loaders are for --ray"),
        (["--address", "auto"], "--loaders are for --ray"),
        (["--ray", "--workers", "2"], "give --loaders"),
        (["--ray", "--listen"], "give --loaders"),
    ],
)
def test_options_that_do_not_go_together(words: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["feed", *words], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert message in done.output
