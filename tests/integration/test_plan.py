"""A real plan: the model measured, every strategy predicted, and what this machine can run compared with it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests.forked_ranks import RankServer
from tests.launching import need

from distributed_training.config import Config
from distributed_training.planning import measuring
from distributed_training.planning.measuring import Laboratory
from distributed_training.planning.own_time import measure_own_time
from distributed_training.planning.pace import Pace
from distributed_training.planning.planner import PlanOptions, make_plan
from distributed_training.planning.report import write_plan
from distributed_training.planning.ways import BY_LABEL


@pytest.mark.timeout(600)
def test_the_memory_of_real_ranks_is_predicted(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is deterministic enough to be held to; times on a busy machine are not."""
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config = Config().replace(
        **{
            "model.args": {"hidden": [2048, 1024, 1024]},
            "training.batch_size": 256,
            "training.device": "cpu",
        }
    )

    options = PlanOptions(
        gpus=(2, 64), per_node=2, bandwidth=1e6, intra_bandwidth=1e9, strategies=("ddp",), measure=True
    )
    plan = make_plan(config, options)

    rows = {(one.way.label, one.ranks): one for one in plan.predictions}
    assert list(rows) == [("ddp", 2), ("ddp", 64), ("single", 1)]
    here = [one for key, one in rows.items() if key[1] <= 2]
    assert [one.trouble for one in here] == ["", ""]
    assert all(abs(one.memory_error or 1.0) < 0.15 for one in here), [one.memory_error for one in here]
    assert all(one.measured_step and one.time.whole > 0 and one.pace > 0 for one in here)
    assert any(note.startswith("noise: ") for note in plan.notes)
    assert rows["ddp", 64].time.talked > 20, "26 MB over a network of 1 MB/s"
    assert rows["single", 1].check, "a batch between the measured ones"
    files = {file.suffix: file for file in write_plan(plan, Path("reports/plan.md"))}
    assert set(files) == {".md", ".html", ".png", ".json"}
    assert files[".png"].read_bytes().startswith(b"\x89PNG")
    text = files[".md"].read_text()
    assert "Predicted and measured" in text
    assert "plan.png" in text


def test_real_ranks_time_how_they_talk(rank_server: RankServer, tmp_path: Path) -> None:
    out = tmp_path / "links.json"

    rank_server.start(2, ["-m", "distributed_training.planning.sweep", str(out), "ddp", "cpu", "100"]).succeed()

    found = json.loads(out.read_text())
    assert found["backend"] == "gloo"
    assert found["ranks"] == 2
    assert set(found["times"]) == {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_reduce_bf16"}
    assert all(seconds > 0 for points in found["times"].values() for _, seconds in points)
    assert 0 <= found["overlap"] <= 1
    assert found["slowdown"] == 1.0, "Gloo's threads sleep until a message comes"


def test_horovod_says_what_its_threads_and_messages_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_LAUNCHES", 2)  # no figure is held to here
    way = BY_LABEL["horovod"]
    need("horovod", way.installed)
    lab = Laboratory(Config().replace(**{"training.device": "cpu"}), tmp_path, 1, 100.0, lambda line: None)

    found = lab.links(way, 2)

    assert found is not None
    assert found.backend == "horovod"
    assert found.slowdown >= 1.0
    assert found.message is not None
    assert 0 <= found.message < 1


def test_what_deepspeed_adds_to_a_step_is_measured_with_one_rank(tmp_path: Path) -> None:
    ways = [BY_LABEL["deepspeed 1"], BY_LABEL["deepspeed 2"], BY_LABEL["ddp"]]
    need("deepspeed", ways[0].installed)
    said: list[str] = []
    config = Config().replace(**{"model.args": {"hidden": [256] * 12}, "training.device": "cpu"})
    lab = Laboratory(config, tmp_path, 1, 100.0, said.append, seconds=0.1)
    profile = lab.profile({1: [8, 16]})

    with Pace(lab, profile) as pace:
        measure_own_time(ways, lab, pace, profile)

    assert list(profile.own) == ["deepspeed 2"], "stage 1 is as stage 2, and ddp has nothing of the kind"
    assert profile.own["deepspeed 2"] > 0, said
    assert list(pace.seen) == [(1, 8)]
    assert len(pace.seen[1, 8]) == 7, "by turns with single"


SLOW = """
import time, torch
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, at):
        time.sleep(60)
        return torch.zeros(8), 0
"""


@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGINT])
def test_a_plan_that_is_told_to_end_leaves_no_process_behind(told: signal.Signals, in_tmp: Path) -> None:
    """At once, however long the measurement would take."""
    (in_tmp / "slow.py").write_text(SLOW)
    command = [sys.executable, "-m", "distributed_training", "plan", "--gpus", "1", "training.device=cpu"]
    command += ["data.dataset=slow:Slow", "model=mlp", "training.batch_size=8"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as plan:
        seen = psutil.Process(plan.pid)
        deadline = time.monotonic() + 60
        while not (measuring := seen.children(recursive=True)):
            assert plan.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        plan.send_signal(told)
        assert plan.wait(30) == 130
    assert not [process for process in measuring if process.is_running()]
