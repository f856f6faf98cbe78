"""kill -9 at any step, and the same command again: the run ends as if nothing had happened, bit for bit."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from distributed_training.checkpoint import read_state

CHILD = """
import os, signal, sys
from distributed_training import Callback
from distributed_training.config import load_config
from distributed_training.training.job import build_job

class Kill(Callback):
    def on_step_end(self, trainer, step, loss):
        if trainer.cursor.global_step == int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)

with build_job(load_config(None, sys.argv[2:])) as job:
    job.trainer.callbacks.append(Kill())
    job.train()
"""
SETTINGS = (
    "training.epochs=3",
    "training.gradient_accumulation=3",
    "training.log_every=1",
    "model.args.dropout=0.2",
    "data.augment.crop=1",
    "checkpoint.every_steps=7",
    "run.progress=off",
)


def train(kill_at: int, *settings: str) -> int:
    command = [sys.executable, "-c", CHILD, str(kill_at), *SETTINGS, *settings]
    return subprocess.run(command, timeout=120, stderr=subprocess.DEVNULL).returncode


def last_state(run: str) -> dict:
    return read_state(max(Path(f"runs/{run}/checkpoints").glob("step-*")))


def losses(run: str) -> dict[int, float]:
    events = [json.loads(line) for line in Path(f"runs/{run}/events.jsonl").read_text().splitlines()]
    return {event["step"]: event["train_loss"] for event in events if event["event"] == "metrics" and "lr" in event}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict[int, float]]:
    """Final state and losses of the run that nobody killed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("undisturbed"))
        assert train(-1, "run.name=whole") == 0
        return last_state("whole"), losses("whole")


@pytest.mark.parametrize(
    "kills",
    [
        # (step, loader processes): before the first checkpoint, and at the last step of an epoch.
        [(5, 0), (46, 0)],
        # With another number of workers each time: in the first epoch, in the second, and to the end.
        [(12, 2), (30, 0)],
    ],
    ids=["one process", "workers"],
)
def test_killed_and_resumed_equals_undisturbed(
    in_tmp: Path, undisturbed: tuple[dict, dict[int, float]], kills: list[tuple[int, int]]
) -> None:
    for step, workers in kills:
        settings = ("run.name=killed", "checkpoint.resume=auto", f"data.num_workers={workers}")
        assert train(step, *settings) == -signal.SIGKILL
    assert train(-1, "run.name=killed", "checkpoint.resume=auto", f"data.num_workers={kills[0][1]}") == 0
    whole, killed = undisturbed[0], last_state("killed")
    assert whole["cursor"] == killed["cursor"] == {"epoch": 3, "step": 0, "global_step": 69}
    for name, tensor in whole["model"].items():
        assert torch.equal(tensor, killed["model"][name]), name
    for name, moments in whole["optimizer"]["state"].items():
        for key, tensor in moments.items():
            assert torch.equal(tensor, killed["optimizer"]["state"][name][key]), (name, key)
    assert undisturbed[1] == losses("killed")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_at_the_next_step_and_says_how_to_go_on(in_tmp: Path, number: signal.Signals, code: int) -> None:
    command = [sys.executable, "-m", "distributed_training", "train", "training.epochs=100000", "run.name=long"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "epoch 2/" in line:
                break
        process.send_signal(number)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == code
    assert "everything is saved" in out
    assert "dtrain train --resume runs/long" in out
    if number == signal.SIGTERM:
        return
    saved = last_state("long")["cursor"]
    again = [*command[:4], "--resume", "runs/long", f"training.epochs={saved['epoch'] + 1}", "run.progress=off"]
    done = subprocess.run(again, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert "Training completed" in done.stdout
