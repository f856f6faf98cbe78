"""`dtrain launch --ray` on a real cluster of several nodes: equal results, lost nodes, failures, mistakes."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.forked_ranks import RankServer
from tests.launching import environment, free_port, need
from tests.ray_nodes import Nodes

from distributed_training.checkpoint import read_state
from distributed_training.launch.ray_address import is_started_here, started_here
from distributed_training.launch.ray_cluster import connected
from distributed_training.runtime.errors import MissingDependencyError

PROGRAMS = Path(__file__).parent / "programs"
SETTINGS = (
    "strategy=ddp",
    "training.epochs=2",
    "model.args.dropout=0.2",
    "data.augment.crop=1",
    "checkpoint.every_steps=5",
    "run.progress=off",
)
LESS = {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"}  # a process that no test needs


@pytest.fixture(scope="module")
def hidden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that no node sees."""
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True)
    need("root, to have storage that is not shared", tried.returncode == 0)
    return tmp_path_factory.mktemp("hidden")


@pytest.fixture(scope="module")
def nodes(hidden: Path) -> Iterator[Nodes]:
    with Nodes(2, 2, gpus=1, hidden=hidden) as cluster:
        yield cluster


def launch(nodes: Nodes, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "distributed_training", "launch", "--ray", "--address", nodes.address, *words]
    own = environment(**LESS)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=own)


def final_state(folder: Path) -> dict:
    return read_state(max(folder.glob("checkpoints/step-*")))


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependencyError, match=r"needs ray.*distributed-training\[ray\]"), connected():
        pass


def test_only_a_cluster_of_ray_start_is_joined_unasked(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(in_tmp))
    monkeypatch.setenv("RAY_CLIENT_MODE", "0")  # Ray sets it when it is imported
    note = in_tmp / "ray/ray_current_cluster"
    assert started_here() is None  # whatever else runs on this machine, as those of other tests
    note.parent.mkdir()
    note.write_text(f"127.0.0.1:{free_port()}")
    assert started_here() is None  # one that is gone
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        note.write_text(f"127.0.0.1:{port}")
        assert started_here() == f"127.0.0.1:{port}"
        assert is_started_here(f"localhost:{port}")
        assert not is_started_here(f"localhost:{free_port()}")
        assert not is_started_here(f"ray://localhost:{port}")


@pytest.mark.timeout(400)
def test_a_training_whose_node_is_killed_ends_as_if_nothing_had_happened(
    nodes: Nodes, rank_server: RankServer, in_tmp: Path
) -> None:
    program = str(PROGRAMS / "waiting.py")
    asked = ("--workers", "2", "--gpus-per-worker", "0.5", "--placement", "spread")  # one node has room for both, too
    job = launch(nodes, *asked, "--", program, "17", *SETTINGS, "run.root=killed")
    try:
        standing, end = in_tmp / "standing", time.monotonic() + 180
        while not standing.exists():
            assert job.poll() is None, job.communicate()[1]
            assert time.monotonic() < end, "the ranks do not come to their step"
            time.sleep(0.1)
        nodes.kill_node_of(int(standing.read_text()))
        rank_server.start(2, [program, "-1", *SETTINGS, "run.name=whole"], PWD=str(in_tmp)).succeed()
        out, errors = job.communicate(timeout=180)
    finally:
        job.kill()
        job.communicate()
    assert job.returncode == 0, errors
    assert "is gone: its node or the Ray worker that ran it died" in errors
    assert "restart 1 of 3: all ranks start again" in errors
    assert "completed after 46 steps on 2 ranks" in out

    (folder,) = (in_tmp / "killed").iterdir()
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    first, second = [event["resumed_from"] for event in events if event["event"] == "start"]
    assert first is None
    assert second in (5, 10, 15)  # the newest one that was safe when the node died
    expected, state = final_state(in_tmp / "runs" / "whole"), final_state(folder)
    assert state["cursor"] == expected["cursor"]
    for name, tensor in expected["model"].items():
        assert torch.equal(tensor, state["model"][name]), name


@pytest.mark.timeout(300)
def test_mistakes_are_said_before_anything_starts_and_a_failure_ends_all_ranks(
    nodes: Nodes, hidden: Path, in_tmp: Path
) -> None:
    command = [sys.executable, str(PROGRAMS / "ray_mistakes.py"), nodes.address, str(hidden)]
    failing = [str(PROGRAMS / "failing.py"), "raise", "5", *SETTINGS]
    done = subprocess.run(
        [*command, f"127.0.0.1:{free_port()}", *failing],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment(**LESS),
    )
    assert done.returncode == 0, done.stderr
    said = json.loads((in_tmp / "answers.json").read_text())
    expected = {
        "nobody": (7, "no Ray cluster answers at 127.0.0.1:"),
        "many": (7, "cannot hold 8 workers of 1 CPU each: it has room for "),
        "large": (7, "cannot hold 1 worker of 64 CPU each"),
        "gpus": (7, "cannot hold 1 worker of 1 CPU, 2 GPU each"),
        "spread": (7, "each on a node of its own"),
        "together": (7, "all on one node: it has room for 2"),
        "folder": (2, f"has no folder {hidden / 'inner'}"),
        "config": (2, f"{hidden / 'config.yaml'}: cannot be read"),
        "root": (4, f"run.root={hidden / 'runs'} is not shared"),
    }
    for name, (code, text) in expected.items():
        assert said[name][0] == code, said[name]
        assert text in said[name][1]
    assert said["fine"][0] == 0
    assert sorted(said["fine"][2].splitlines()) == ["rank 0 of 2 sees 0", "rank 1 of 2 sees 0"]  # half of one each
    code, report = said["failing"]
    lines = report.strip().splitlines()
    assert code == 1
    assert lines[-1].startswith("rank 1 of 2 (")
    assert lines[-1].endswith("failed: ValueError: bad luck")
    assert 'raise ValueError("bad luck")' in report
    assert "start again" not in done.stderr  # it would fail again
    assert [(in_tmp / f"gpus-of-{rank}").read_text() for rank in (0, 1)] == ["0", "0"]  # half of it each
