"""strategy=horovod under the real horovodrun: the contract, whole trainings, and failures that speak."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.forked_ranks import RankServer
from tests.launching import CHECKS, ROOT, run_horovod, run_ranks

from distributed_training.config import StrategyConfig
from distributed_training.runtime.errors import MissingDependencyError
from distributed_training.strategies import Place, make_strategy

RANKS = ROOT / "tests" / "strategies" / "ranks"
JOB = str(RANKS / "horovod_job.py")
TRAIN = ["-m", "distributed_training", "train", "training.epochs=2", "run.progress=off", "training.device=cpu"]


def losses(run: Path, key: str = "val_loss") -> list[float]:
    """A metric of a run over its whole length."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event[key] for event in events if event["event"] == "metrics" and key in event]


def said_by_ranks(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What the ranks said on stderr: not horovodrun of itself, nor Horovod's own thread of connections that it lost."""
    lines = [line for line in done.stderr.splitlines() if line.startswith("[") and "<stderr>:" in line]
    return [line for line in lines if "Horovod background loop" not in line]


@pytest.mark.timeout(300)
def test_the_contract_and_what_horovod_adds_to_it() -> None:
    checks = [str((RANKS / name).relative_to(ROOT)) for name in ("contract_native.py", "horovod_checks.py")]
    run_horovod(2, [*CHECKS, *checks], measured=True, STRATEGY="horovod")


def test_the_command_line_trains_as_one_process_does(rank_server: RankServer, tmp_path: Path) -> None:
    """Without a word about the strategy: it is the launcher's. The learning rate changes in every step."""
    words = ["training.gradient_accumulation=2", "training.gradient_clip=1.0"]
    done = run_horovod(2, [*TRAIN, *words, "run.name=ranks"], cwd=tmp_path)
    assert "strategy horovod: horovodrun started 2 processes" in done.stderr
    for name, strategy in (("alone", "single"), ("one", "horovod")):  # a world of one
        own = [*TRAIN, *words, f"run.name={name}", f"strategy={strategy}"]
        rank_server.start_alone(own, PWD=str(tmp_path)).succeed()
    expected = losses(tmp_path / "runs" / "alone")
    assert len(expected) == 2
    assert losses(tmp_path / "runs" / "ranks") == pytest.approx(expected, rel=1e-6)
    assert losses(tmp_path / "runs" / "one") == pytest.approx(expected, rel=1e-6)


def test_interrupted_and_resumed_by_another_strategy(rank_server: RankServer, tmp_path: Path) -> None:
    done = run_horovod(2, [JOB, str(tmp_path), "part", "is_told_to_stop"], check=False)
    assert "interrupted after" in done.stdout, done.stderr
    interrupted = len(losses(tmp_path / "part", "train_loss"))
    rank_server.start_alone(
        [JOB, str(tmp_path), "part", "nothing", "checkpoint.resume=auto", "strategy=single"]
    ).succeed()
    rank_server.start_alone([JOB, str(tmp_path), "whole", "nothing"]).succeed()
    assert 0 < interrupted < len(losses(tmp_path / "whole", "train_loss"))
    for key in ("train_loss", "val_loss"):
        assert losses(tmp_path / "part", key) == pytest.approx(losses(tmp_path / "whole", key), rel=1e-5, abs=1e-6)


class TestTrouble:
    def test_an_exception_ends_all_ranks_and_is_last(self, tmp_path: Path) -> None:
        done = run_horovod(2, [JOB, str(tmp_path), "x", "raises"], check=False)
        assert done.returncode != 0
        said = said_by_ranks(done)
        assert said[-1].startswith("[1]<stderr>:rank 1 of 2 (")
        assert said[-1].endswith("failed: ValueError: one sample too many")
        assert any("horovod_job.py" in line and "in raises" in line for line in said)

    def test_a_rank_that_is_killed_ends_the_job(self, tmp_path: Path) -> None:
        done = run_horovod(2, [JOB, str(tmp_path), "x", "dies"], check=False)
        assert done.returncode != 0
        assert "Process 1 exit with status code 137" in done.stdout

    def test_a_rank_that_hangs_is_named_with_the_line_where_it_stands(self, tmp_path: Path) -> None:
        done = run_horovod(2, [JOB, str(tmp_path), "x", "hangs"], check=False)
        assert done.returncode != 0
        said = "\n".join(said_by_ranks(done))
        assert "[rank 0] no progress for 8 s (run.deadline)" in said
        assert "has not arrived" in said
        assert "in hangs: time.sleep(600)" in said

    def test_a_rank_that_never_comes_is_named(self, tmp_path: Path) -> None:
        done = run_horovod(2, [JOB, str(tmp_path), "x", "is_late"], check=False)
        assert done.returncode != 0
        assert "rank 0 of 2: after 8 s rank 1 had not come to the rendezvous of horovodrun" in done.stderr

    def test_another_launcher_is_refused(self, tmp_path: Path) -> None:
        done = run_ranks(2, [JOB, str(tmp_path), "x", "nothing", "strategy=horovod"], check=False)
        assert done.returncode != 0
        assert (
            "start the ranks with Horovod's own launcher: horovodrun -np 2 python -m distributed_training"
            in done.stderr
        )

    def test_a_missing_library_is_explained(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "horovod.torch", None)
        place = Place(torch.device("cpu"), config=StrategyConfig(name="horovod"))
        with pytest.raises(MissingDependencyError, match=r"horovod, which is not installed.*scripts/build_horovod\.sh"):
            make_strategy(place)
