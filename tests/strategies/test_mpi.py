"""strategy=mpi and strategy.backend=mpi under the real mpirun: the contract, whole trainings, failures that speak."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.forked_ranks import RankServer
from tests.launching import CHECKS, ROOT, run, run_mpi, run_ranks
from tests.strategies.test_horovod import JOB, TRAIN, losses

from distributed_training.config import StrategyConfig
from distributed_training.runtime.errors import ConfigError
from distributed_training.runtime.world import World
from distributed_training.strategies import Place, auto, make_strategy, needs

RANKS = ROOT / "tests" / "strategies" / "ranks"
CASES = [
    pytest.param("mpi", {}, 2, id="mpi"),
    pytest.param("mpi", {"bucket_mb": 0.0001, "find_unused_parameters": True}, 3, id="mpi-many-buckets"),
    pytest.param("zero3", {"backend": "mpi"}, 2, id="zero3"),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("strategy", "options", "ranks"), CASES)
def test_the_contract(strategy: str, options: dict[str, object], ranks: int) -> None:
    checks = str((RANKS / "contract_native.py").relative_to(ROOT))
    run_mpi(
        ranks,
        [*CHECKS, checks],
        measured=True,
        STRATEGY=strategy,
        OPTIONS=json.dumps(options),
    )


@pytest.mark.timeout(300)
def test_compression_and_the_other_strategies_on_mpi() -> None:
    checks = str((RANKS / "mpi_checks.py").relative_to(ROOT))
    run_mpi(2, [*CHECKS, checks], measured=True)


def test_the_command_line_trains_as_one_process_does(rank_server: RankServer, tmp_path: Path) -> None:
    """Without a word about the strategy: the backend is built, so that auto takes it, and says so."""
    words = ["training.gradient_accumulation=2", "training.gradient_clip=1.0"]
    done = run_mpi(2, [*TRAIN, *words, "run.name=ranks"], cwd=tmp_path)
    assert "strategy mpi: mpirun started 2 processes, and the MPI backend is built" in done.stderr
    rank_server.start_alone([*TRAIN, *words, "run.name=alone", "strategy=single"], PWD=str(tmp_path)).succeed()
    run([sys.executable, *TRAIN, *words, "run.name=one", "strategy=mpi"], cwd=tmp_path)  # without mpirun: alone
    expected = losses(tmp_path / "runs" / "alone")
    assert len(expected) == 2
    assert losses(tmp_path / "runs" / "ranks") == pytest.approx(expected, rel=1e-6)
    assert losses(tmp_path / "runs" / "one") == pytest.approx(expected, rel=1e-6)


class TestTrouble:
    def run(self, tmp_path: Path, what: str, *words: str) -> subprocess.CompletedProcess[str]:
        return run_mpi(2, [JOB, str(tmp_path), "x", what, "strategy=mpi", *words], check=False, timeout=90)

    def test_an_exception_ends_all_ranks(self, tmp_path: Path) -> None:
        done = self.run(tmp_path, "raises")
        assert done.returncode != 0
        assert re.search(r"rank 1 of 2 \(.*\) failed: ValueError: one sample too many", done.stderr)
        assert "in raises" in done.stderr

    def test_a_rank_that_is_killed_ends_the_job_and_is_named(self, tmp_path: Path) -> None:
        done = self.run(tmp_path, "dies")
        assert done.returncode == 137
        assert re.search(r"rank 1 with PID \d+ on node \S+ exited on\s+signal 9", done.stdout + done.stderr)

    def test_a_rank_that_hangs_is_named_with_operation_and_line(self, tmp_path: Path) -> None:
        done = self.run(tmp_path, "hangs")
        assert done.returncode == 75
        # Of the rank that says so first: mpirun ends the other with it.
        said = r"\[rank \d\] no progress for 8 s \(run\.deadline\) in the mean loss .*: rank 1 \(.*\) has not arrived"
        assert re.search(said, done.stderr)
        assert "in hangs: time.sleep(600)" in done.stderr

    def test_another_launcher_is_refused(self, tmp_path: Path) -> None:
        done = run_ranks(2, [JOB, str(tmp_path), "x", "nothing", "strategy=mpi"], check=False)
        assert done.returncode != 0
        assert re.search(
            r"torchrun started rank \d of 2, but Open MPI .*sees rank 0 of 1: start the ranks with", done.stderr
        )


def test_verify_runs_it_under_mpirun(tmp_path: Path) -> None:
    words = ["verify", "--strategies", "mpi", "--steps", "4", "--json", "found.json", "training.device=cpu"]
    run([sys.executable, "-m", "distributed_training", *words], cwd=tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())["strategies"][-1]
    assert (found["strategy"], found["result"], found["world_size"]) == ("mpi", "pass", 2)


def test_another_backend_is_refused() -> None:
    place = Place(torch.device("cpu"), config=StrategyConfig(name="mpi", backend="gloo"))
    with pytest.raises(ConfigError, match=r"strategy=mpi exchanges by MPI, but strategy\.backend=gloo"):
        make_strategy(place)


class TestAuto:
    def world(self, **facts: object) -> World:
        return World(rank=1, size=4, launcher="mpirun", **facts)  # type: ignore[arg-type]

    def choose(self, world: World) -> str:
        return auto.choose_strategy(Place(torch.device("cpu"), world))

    def test_several_machines_without_an_address_meet_by_mpi(self) -> None:
        assert self.choose(self.world(local_size=2)) == "mpi"
        assert self.choose(self.world(local_size=2, master="10.0.0.1")) == "ddp"

    def test_one_machine_takes_it_where_it_is_built(self, monkeypatch: pytest.MonkeyPatch) -> None:
        here = self.world(local_size=4, master="127.0.0.1")
        monkeypatch.setattr("distributed_training.native.build.find_built", lambda: None)
        assert self.choose(here) == "ddp"
        monkeypatch.setattr("distributed_training.native.build.find_built", lambda: Path("/somewhere"))
        assert self.choose(here) == "mpi"
        assert self.choose(World(rank=0, size=4, local_size=4, launcher="torchrun", master="a")) == "ddp"


def test_what_it_needs_is_known() -> None:
    assert needs("mpi").launcher == "mpirun"
    assert not needs("mpi")._replace(program="no-such-program").installed
