"""`dtrain launch`: what it refuses, and how."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.launching import free_port


@pytest.fixture(autouse=True)
def _set_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sets it for its process."""
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "nothing to launch"),
        (["--", "trian"], "'trian' is no command of dtrain"),
        (["--", "launch"], "'launch' is no command of dtrain"),
        (["--nproc", "many", "--", "train"], "--nproc many"),
        (["--nproc", "0", "--", "train"], "at least one process"),
        (["--nnodes", "2:1", "--", "train"], "--nnodes 2:1"),
        (["--nnodes", "two", "--", "train"], "--nnodes two"),
        (["--nnodes", "2", "--", "train"], "must know where to meet"),
        (["--rdzv", "host", "--", "train"], "give HOST:PORT"),
        (["--master", "a:1", "--rdzv", "a:1", "--", "train"], "give one of them"),
        (["--nnodes", "2", "--node-rank", "2", "--master", "a:1", "--", "train"], "from 0 to 1"),
        (["--rdzv", "no.such.host.invalid:1", "--", "train"], "no such host"),
        (["--hosts", "a,,b", "--", "train"], "HOST:PROCESSES"),
        (["--hosts", "a", "--env", "NOT_SET_HERE", "--ssh", "true", "--", "train"], "--env NOT_SET_HERE"),
    ],
)
def test_mistakes_are_named(dtrain: Callable, words: list[str], said: str) -> None:
    outcome = dtrain("launch", "--nproc", "1", *words)

    assert outcome.code in (2, 7)
    assert said in outcome.err
    assert len(outcome.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ray", "--", "train"], "--ray needs the number of ranks: --workers"),
        (["--workers", "2", "--", "train"], "--workers is for --ray"),
        (["--ray", "--workers", "0", "--", "train"], "--workers 0: at least one"),
        (["--ray", "--workers", "2", "--min-workers", "3", "--", "train"], "--min-workers 3: from 1 to 2"),
        (
            ["--ray", "--workers", "2", "--gpus-per-worker", "1.5", "--", "train"],
            "a whole number, or a part of one GPU",
        ),
        (["--ray", "--workers", "2", "--placement", "near", "--", "train"], "--placement NEAR: one of PACK, SPREAD"),
        (["--ray", "--workers", "2", "--nproc", "2", "--", "train"], "--nproc is not for --ray"),
        (["--ray", "--workers", "2", "--address", "ray://10.0.0.1:10001", "--", "train"], "ray job submit -- dtrain"),
        (["--ray", "--workers", "2", "--", "train", "nope.yaml"], "nope.yaml: no such file"),
        (["--ray", "--workers", "2", "--", "train", "training.epoch=3"], "did you mean training.epochs?"),
    ],
)
def test_what_ray_could_not_do_is_refused_before_it_starts(dtrain: Callable, words: list[str], said: str) -> None:
    outcome = dtrain("launch", *words)

    assert outcome.code == 2
    assert said in outcome.err
    assert len(outcome.err.splitlines()) == 1


def test_a_master_that_does_not_answer_is_named_within_the_deadline(dtrain: Callable) -> None:
    words = ["--nproc", "1", "--nnodes", "2", "--node-rank", "1", "--master", f"127.0.0.1:{(port := free_port())}"]

    outcome = dtrain("launch", *words, "--deadline", "1", "--", "train")

    assert outcome.code == 7
    assert f"no answer from the master at 127.0.0.1:{port}" in outcome.err


@pytest.mark.parametrize("way", ["--master", "--rdzv"])
def test_a_machine_that_never_comes(dtrain: Callable, way: str) -> None:
    place = f"127.0.0.1:{free_port()}"

    outcome = dtrain("launch", "--nproc", "1", "--nnodes", "2", way, place, "--deadline", "2", "--", "train")

    assert outcome.code == 7
    assert place in outcome.err
    assert "2 machines" in outcome.err


def test_a_port_in_use_is_named(dtrain: Callable) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        outcome = dtrain(
            "launch", "--nproc", "1", "--nnodes", "2", "--master", f"127.0.0.1:{port}", "--deadline", "2", "--", "train"
        )

    assert outcome.code == 7
    assert f"port {port} is in use" in outcome.err


def test_slurm_writes_a_script(dtrain: Callable) -> None:
    words = ["--slurm", "--nodes", "2", "--nproc", "4", "--account", "us", "--", "train", "training.epochs=3"]

    shown = dtrain("launch", *words)
    written = dtrain("launch", "--output", "job.sh", *words)

    assert shown.code == written.code == 0
    assert "sbatch job.sh" in written.out
    assert Path("job.sh").read_text() == shown.out
    assert "#SBATCH --account=us" in shown.out
    assert "-m distributed_training train training.epochs=3" in shown.out
    assert subprocess.run(["bash", "-n", "job.sh"], timeout=10).returncode == 0
