"""`distributed_training.spawn`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.launch.programs import importable

from distributed_training import Config, DistributedTrainingError, Trainer, spawn
from distributed_training.launch.spawn import start_method


@pytest.mark.timeout(240)
def test_a_closure_trains_in_two_ranks_as_in_one_process(in_tmp: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(70, 8)
    y = (x.sum(1) > 0).long()
    config = Config.from_dict({"training": {"epochs": 2, "batch_size": 16}, "run": {"progress": "off"}})

    def train() -> tuple[torch.Tensor, str, Any]:
        torch.manual_seed(1)
        model = torch.nn.Linear(8, 2)
        trainer = Trainer(model, config=config, device="cpu", run_dir=False)
        loss = trainer.train((x, y), (x, y)).metrics["val_loss"]
        trainer.close()
        return model.weight.detach(), trainer.strategy.name, loss

    assert start_method(train) == "fork"
    alone = train()
    ranks = spawn(train, nproc=2)

    assert [name for _, name, _ in (alone, *ranks)] == ["single", "ddp", "ddp"]
    assert torch.equal(ranks[0][0], ranks[1][0])
    assert torch.allclose(ranks[0][0], alone[0], rtol=1e-6, atol=1e-7)
    assert ranks[0][2] == ranks[1][2] == pytest.approx(alone[2], rel=1e-6)


@pytest.mark.timeout(240)
def test_an_importable_function_runs_in_fresh_processes() -> None:
    assert start_method(importable.rank_and) == "spawn"

    values = spawn(importable.rank_and, 2, args=(10,))

    assert [rank for rank, _ in values] == [0, 1]
    assert [tensor.tolist() for _, tensor in values] == [[10.0] * 3, [11.0] * 3]
    assert "RANK" not in os.environ


def test_the_failing_ranks_traceback_is_in_the_error() -> None:
    def fail() -> None:
        if os.environ["RANK"] == "1":
            raise ValueError("bad luck")
        signal.pause()

    with pytest.raises(DistributedTrainingError) as raised:
        spawn(fail)

    lines = str(raised.value).splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "in fail" in lines[1]
    assert lines[-1] == "rank 1 of 2 failed: ValueError: bad luck"


def test_a_killed_rank_is_named() -> None:
    def die() -> None:
        if os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()

    with pytest.raises(DistributedTrainingError, match="rank 0 of 2 was killed by SIGKILL"):
        spawn(die)


def test_what_cannot_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DistributedTrainingError, match="at least one process"):
        spawn(print, nproc=0)
    monkeypatch.setattr(sys.modules["torch"].cuda, "is_initialized", lambda: True)
    with pytest.raises(DistributedTrainingError, match="already uses a GPU"):
        spawn(lambda: None)
