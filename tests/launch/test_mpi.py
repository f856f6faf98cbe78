"""`dtrain launch --mpi`: the ranks of this machine, and a hostfile over two machines with a network between them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.forked_ranks import RankServer
from tests.launch.networks import two_machines
from tests.launching import environment, need_mpi

from distributed_training.config.errors import ConfigError
from distributed_training.launch import mpi
from distributed_training.launch.mpi import Job, read_hostfile
from distributed_training.launch.ssh import Place

PROGRAMS = Path(__file__).parent / "programs"
DTRAIN = [sys.executable, "-m", "distributed_training"]
SETTINGS = ("training.epochs=1", "run.progress=off", "run.deadline=60", "run.name=x", "strategy=mpi")
AGENT = f"{sys.executable} {PROGRAMS / 'agent_to_namespace.py'}"


def launch(*words: str, before: tuple[str, ...] = (), **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `dtrain launch --mpi` to its end."""
    need_mpi()
    command = [*before, *DTRAIN, "launch", "--mpi", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment(**variables))


def unwrapped(text: str) -> str:
    """What was logged, without the line breaks of a narrow screen."""
    return " ".join(text.split())


def events() -> list[dict[str, object]]:
    return [json.loads(line) for line in Path("runs/x/events.jsonl").read_text().splitlines()]


def val_loss() -> float:
    return float([event["val_loss"] for event in events() if "val_loss" in event][-1])  # type: ignore[arg-type]


@pytest.mark.timeout(240)
def test_a_hostfile_over_two_machines_trains_as_one_process_does(rank_server: RankServer, in_tmp: Path) -> None:
    """mpirun is told of no address: MPI tells the ranks where they meet."""
    need_mpi()
    alone = [*DTRAIN[1:], "train", "training.epochs=1", "run.progress=off", "run.name=x"]
    rank_server.start_alone(alone, PWD=str(in_tmp)).succeed()
    expected = val_loss()
    Path("runs").rename("alone")
    with two_machines() as machines:
        Path("hosts").write_text("".join(f"{machine.name} slots=1\n" for machine in machines))
        here = (*AGENT.split(), "--here", machines[0].name)
        words = ("--hostfile", "hosts", "--", "train", *SETTINGS[:-1])  # the strategy is left to auto
        done = launch(*words, before=here, PRTE_MCA_plm_ssh_agent=AGENT)
    assert done.returncode == 0, done.stderr
    assert val_loss() == pytest.approx(expected, abs=1e-5)
    assert "strategy mpi: mpirun started 2 processes on several machines, and MPI tells" in unwrapped(done.stderr)


@pytest.mark.timeout(120)
def test_the_error_of_the_rank_that_failed_is_last_and_its_code_is_the_jobs(in_tmp: Path) -> None:
    done = launch("--nproc", "2", "--", str(PROGRAMS / "failing.py"), "raise", "3", *SETTINGS)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert re.fullmatch(r"rank 1 of 2 \(.*, process \d+\) failed: ValueError: bad luck", last)
    assert done.stderr.count("ValueError: bad luck") == 2  # the traceback, and the last line
    assert "\x1e" not in done.stderr

    done = launch("--nproc", "2", "--", "train", *SETTINGS, "training.lr=-1")
    assert done.returncode == 2
    assert "training.lr=-1" in done.stderr.strip().splitlines()[-1]


@pytest.mark.timeout(120)
def test_a_rank_that_is_killed_is_named_last(in_tmp: Path) -> None:
    done = launch("--nproc", "2", "--", str(PROGRAMS / "failing.py"), "kill", "3", *SETTINGS)
    assert done.returncode == 128 + signal.SIGKILL
    assert re.match(r"rank 1 \(.*, process \d+\) was killed by SIGKILL: ", done.stderr.strip().splitlines()[-1])


@pytest.mark.timeout(120)
def test_ctrl_c_saves_first(in_tmp: Path) -> None:
    need_mpi()
    words = ["training.epochs=100000", "run.progress=plain", "run.name=x", "strategy=mpi"]
    command = [*DTRAIN, "launch", "--mpi", "--nproc", "2", "--", "train", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=environment(), **pipes) as process:  # type: ignore[call-overload]
        next(line for line in process.stdout if "epoch 2/" in line)
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=60)[0]
    assert process.returncode == 130, rest
    assert list(Path("runs/x/checkpoints").glob("step-*"))
    assert "Traceback" not in rest


class TestHostfile:
    def test_the_ways_to_write_it(self, in_tmp: Path) -> None:
        Path("hosts").write_text(
            "# GPUs\nmachine1 slots=2\n\nmachine2:3   # old\n10.0.0.3 slots = 4 max_slots=8\nlast\n"
        )
        assert read_hostfile(Path("hosts"), None) == [
            Place("machine1", 2),
            Place("machine2", 3),
            Place("10.0.0.3", 4),
            Place("last", 1),
        ]
        assert [place.nproc for place in read_hostfile(Path("hosts"), 2)] == [2, 2, 2, 2]

    @pytest.mark.parametrize("text", ["", "machine1 2\n", "machine1 slots=two\n", "--slots\n"])
    def test_what_cannot_be_read_is_refused(self, in_tmp: Path, text: str) -> None:
        Path("hosts").write_text(text)
        with pytest.raises(ConfigError, match="machine1 slots=2"):
            read_hostfile(Path("hosts"), None)
        with pytest.raises(ConfigError, match="nowhere"):
            read_hostfile(Path("nowhere"), None)

    def test_each_mpi_is_spoken_to_in_its_own_words(self, tmp_path: Path) -> None:
        job = Job(["train.py"], [Place("a", 2), Place("b", 1)])
        open_mpi = mpi._OpenMPI().words(job, ["DTRAIN_RUN__DEADLINE"], tmp_path)
        assert open_mpi[-6:] == ["--hostfile", str(tmp_path / "hosts"), "-np", "3", "-x", "DTRAIN_RUN__DEADLINE"]
        assert (tmp_path / "hosts").read_text() == "a slots=2\nb slots=1\n"
        assert mpi._Hydra().words(job, ["X"], tmp_path) == ["-f", str(tmp_path / "hosts"), "-np", "3"]
        assert (tmp_path / "hosts").read_text() == "a:2\nb:1\n"


@pytest.mark.parametrize(
    ("said", "who"),
    [
        ("prterun noticed that process rank 1 with PID 12 on node a exited on\nsignal 9 (Killed).\n", "rank 1"),
        ("=   PID 12 RUNNING AT a\n=   EXIT CODE: 9\n===\nYOUR ... EXIT STRING: Killed (signal 9)\n", "a rank"),
    ],
    ids=["Open MPI", "MPICH"],
)
def test_what_each_mpi_says_of_a_killed_rank_is_understood(said: str, who: str) -> None:
    outcome = mpi._killed(said)
    assert outcome is not None
    assert outcome.code == 137
    assert outcome.report.startswith(f"{who} (a, process 12) was killed by SIGKILL")
    assert mpi._killed("it was a good signal 9\n") is None


def test_options_of_other_launchers_are_refused(in_tmp: Path) -> None:
    done = launch("--max-restarts", "2", "--", "train")
    assert done.returncode == 2
    assert "--max-restarts is not for --mpi" in done.stderr
