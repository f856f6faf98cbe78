"""`distributed_training.spawn`."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from tests.launch.programs import importable
from tests.launching import run

from distributed_training import DistributedTrainingError, spawn
from distributed_training.launch.spawn import start_method

CLOSURE = Path(__file__).parent / "programs" / "closure.py"


@pytest.mark.timeout(240)
def test_a_closure_trains_in_two_ranks_as_in_one_process(tmp_path: Path) -> None:
    """In a process of its own: other tests leave threads behind, and a fork copies the locks they may hold."""
    found = json.loads(run([sys.executable, str(CLOSURE)], cwd=tmp_path, timeout=200).stdout)

    alone, ranks = found["alone"], found["ranks"]
    assert found["method"] == "fork"
    assert [each["strategy"] for each in (alone, *ranks)] == ["single", "ddp", "ddp"]
    assert ranks[0] == ranks[1]
    assert ranks[0]["weight"] == pytest.approx(alone["weight"], rel=1e-6, abs=1e-7)
    assert ranks[0]["loss"] == pytest.approx(alone["loss"], rel=1e-6)


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
