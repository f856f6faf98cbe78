"""kill -9 at any step, and the same command again: the run ends as if nothing had happened, bit for bit."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from tests.forked_ranks import RankServer

from distributed_training.checkpoint import read_state

PROGRAM = str(Path(__file__).parent / "killed.py")
SETTINGS = (
    "training.epochs=3",
    "training.gradient_accumulation=3",
    "training.log_every=1",
    "model.args.dropout=0.2",
    "data.augment.crop=1",
    "checkpoint.every_steps=7",
    "run.progress=off",
)


def train(rank_server: RankServer, folder: Path, kill_at: int, *settings: str) -> int | None:
    """Exit code of a training."""
    words = [PROGRAM, str(kill_at), *SETTINGS, *settings]
    return rank_server.start_alone(words, PWD=str(folder)).end()[0][0]


def last_state(run: Path) -> dict:
    return read_state(max((run / "checkpoints").glob("step-*")))


def losses(run: Path) -> dict[int, float]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return {event["step"]: event["train_loss"] for event in events if event["event"] == "metrics" and "lr" in event}


@pytest.fixture(scope="module")
def undisturbed(rank_server: RankServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict[int, float]]:
    """Final state and losses of the run that nobody killed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert train(rank_server, folder, -1, "run.name=whole") == 0
    run = folder / "runs" / "whole"
    return last_state(run), losses(run)


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
    rank_server: RankServer,
    tmp_path: Path,
    undisturbed: tuple[dict, dict[int, float]],
    kills: list[tuple[int, int]],
) -> None:
    for step, workers in kills:
        settings = ("run.name=killed", "checkpoint.resume=auto", f"data.num_workers={workers}")
        assert train(rank_server, tmp_path, step, *settings) == -signal.SIGKILL
    last = ("run.name=killed", "checkpoint.resume=auto", f"data.num_workers={kills[0][1]}")
    assert train(rank_server, tmp_path, -1, *last) == 0
    run = tmp_path / "runs" / "killed"
    whole, killed = undisturbed[0], last_state(run)
    assert whole["cursor"] == killed["cursor"] == {"epoch": 3, "step": 0, "global_step": 69}
    for name, tensor in whole["model"].items():
        assert torch.equal(tensor, killed["model"][name]), name
    for name, moments in whole["optimizer"]["state"].items():
        for key, tensor in moments.items():
            assert torch.equal(tensor, killed["optimizer"]["state"][name][key]), (name, key)
    assert undisturbed[1] == losses(run)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_at_the_next_step_and_says_how_to_go_on(
    rank_server: RankServer, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    command = ["-m", "distributed_training", "train", "training.epochs=100000", "run.name=long"]
    job = rank_server.start_alone(command, PWD=str(tmp_path))
    job.until("epoch 2/")
    job.signal(0, number)
    codes, screen = job.end()
    assert codes == [code]
    assert "everything is saved" in screen
    assert "dtrain train --resume runs/long" in screen
    if number == signal.SIGTERM:
        return
    saved = last_state(tmp_path / "runs" / "long")["cursor"]
    again = [*command[:3], "--resume", "runs/long", f"training.epochs={saved['epoch'] + 1}", "run.progress=off"]
    assert "Training completed" in rank_server.start_alone(again, PWD=str(tmp_path)).succeed()
