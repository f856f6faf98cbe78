"""`dtrain launch` on one machine: real processes that train, fail, are killed, restarted and interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from tests.forked_ranks import RankServer
from tests.launching import environment, free_port, scratch

from distributed_training.checkpoint import read_state

PROGRAMS = Path(__file__).parent / "programs"
LAUNCH = [sys.executable, "-m", "distributed_training", "launch"]
SETTINGS = (
    "strategy=ddp",
    "training.epochs=2",
    "model.args.dropout=0.2",
    "data.augment.crop=1",
    "checkpoint.every_steps=5",
    "run.progress=off",
)


def launch(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [*LAUNCH, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment(**variables))


def final_state(folder: Path) -> dict:
    return read_state(max(folder.glob("checkpoints/step-*")))


def nothing_of_torchs_own(text: str) -> bool:
    return not any(sign in text for sign in ("ChildFailedError", "torch/distributed/elastic", "W0", "E0", "W1", "E1"))


@pytest.mark.timeout(400)
def test_a_job_that_is_started_again_ends_as_if_nothing_had_happened(rank_server: RankServer, in_tmp: Path) -> None:
    failing = str(PROGRAMS / "failing.py")
    rank_server.start(2, [failing, "no", "-1", *SETTINGS, "run.name=whole"], PWD=str(in_tmp)).succeed()

    killed = launch("--nproc", "2", "--max-restarts", "1", "--", failing, "kill", "17", *SETTINGS, "run.root=killed")
    assert killed.returncode == 0, killed.stderr
    assert "restart 1 of 1: all ranks start again" in killed.stderr
    assert "completed after 46 steps" in killed.stdout
    (in_tmp / "failed-once").unlink()

    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}", "--max-restarts=1"]
    again = [sys.executable, *torchrun, failing, "kill", "17", *SETTINGS, "run.name=torchrun"]
    with scratch() as folder:  # torchrun leaves its logs behind
        done = subprocess.run(again, capture_output=True, text=True, timeout=240, env=environment(TMPDIR=folder))
    assert done.returncode == 0, done.stderr

    expected = final_state(in_tmp / "runs" / "whole")
    runs = list((in_tmp / "killed").iterdir())
    assert len(runs) == 1
    for folder in (runs[0], in_tmp / "runs" / "torchrun"):
        events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        first, second = [e["resumed_from"] for e in events if e["event"] == "start"]
        assert first is None
        assert second in (5, 10, 15)  # the newest one that was safe when the rank was killed
        state = final_state(folder)
        assert state["cursor"] == expected["cursor"]
        for name, tensor in expected["model"].items():
            assert torch.equal(tensor, state["model"][name]), name


@pytest.mark.timeout(240)
def test_the_traceback_of_the_rank_that_failed_comes_last(in_tmp: Path) -> None:
    done = launch("--nproc", "2", "--", str(PROGRAMS / "failing.py"), "raise", "5", *SETTINGS)

    assert done.returncode == 1
    last = done.stderr.strip().splitlines()
    assert last[-1].startswith("rank 1 of 2 (")
    assert last[-1].endswith(") failed: ValueError: bad luck")
    assert last[-2] == "ValueError: bad luck"
    assert done.stderr.count("Traceback") == 1
    assert 'failing.py", line' in done.stderr
    assert "runpy" not in done.stderr
    assert nothing_of_torchs_own(done.stderr), done.stderr


@pytest.mark.timeout(240)
def test_a_killed_rank_is_named_with_what_that_usually_means(in_tmp: Path) -> None:
    done = launch("--nproc", "2", "--", str(PROGRAMS / "failing.py"), "kill", "5", *SETTINGS)

    assert done.returncode == 128 + signal.SIGKILL
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("rank 1 of 2 (")
    assert "was killed by SIGKILL" in last
    assert "memory ran out" in last
    assert nothing_of_torchs_own(done.stderr), done.stderr


@pytest.mark.timeout(240)
def test_a_mistake_of_the_user_is_one_line(in_tmp: Path) -> None:
    done = launch("--nproc", "2", "--", "train", "training.epoch=3")

    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stderr.strip().endswith("unknown setting training.epoch; did you mean training.epochs?")


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_passed_on_once_and_the_ranks_save(in_tmp: Path, number: signal.Signals, code: int) -> None:
    command = [*LAUNCH, "--nproc", "2", "--", "train", "strategy=ddp", "training.epochs=100000", "run.name=long"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "epoch 2/" in line:
                break
        process.send_signal(number)
        process.send_signal(number)  # as a terminal and a scheduler do
        out, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    assert "everything is saved" in out
    assert "Traceback" not in err
    assert final_state(in_tmp / "runs" / "long")["cursor"]["global_step"] > 23


@pytest.mark.timeout(120)
def test_ranks_get_their_share_of_the_cores_and_do_not_outlive_a_killed_launcher(in_tmp: Path) -> None:
    variables = {k: v for k, v in environment().items() if k != "OMP_NUM_THREADS"}
    command = [*LAUNCH, "--nproc", "2", "--", str(PROGRAMS / "sleeping.py"), "--width", "8"]
    files = [in_tmp / f"rank-{rank}.json" for rank in range(2)]
    with scratch() as folder, subprocess.Popen(command, env={**variables, "TMPDIR": folder}) as process:
        _wait_until(lambda: all(file.exists() for file in files))
        process.kill()
        facts = [json.loads(file.read_text()) for file in files]
        _wait_until(lambda: not any(psutil.pid_exists(fact["pid"]) for fact in facts))
    for fact in facts:
        assert fact["words"] == [str(PROGRAMS / "sleeping.py"), "--width", "8"]
        assert fact["home"] == str(PROGRAMS)
        assert fact["threads"] == str(max(1, len(os.sched_getaffinity(0)) // 2))


def _wait_until(true: object, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not true():  # type: ignore[operator]
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)
