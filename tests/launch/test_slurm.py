"""The batch script is one that a shell runs, with processes that find each other by Slurm's variables."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.launching import environment

from distributed_training import DistributedTrainingError
from distributed_training.launch.slurm import Request, script

PROGRAMS = Path(__file__).parent / "programs"
FIRST_PORT, PORTS = 15000, 20000  # of runtime/world.py


def free_port_as_job() -> int:
    """A job's number from which `runtime/world.py` makes a port that is free."""
    with socket.socket() as probe:
        for port in range(FIRST_PORT + os.getpid() % PORTS, FIRST_PORT + PORTS):
            try:
                probe.bind(("127.0.0.1", port))
                return PORTS + port - FIRST_PORT
            except OSError:
                continue
    raise AssertionError("no free port")


@pytest.mark.timeout(300)
def test_a_job_saves_at_its_limit_is_requeued_and_goes_on(in_tmp: Path) -> None:
    for name in ("sbatch", "srun", "scontrol"):
        tool = in_tmp / "bin" / name
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(f"#!{sys.executable}\n{(PROGRAMS / 'fake_slurm.py').read_text()}")
        tool.chmod(0o755)
    program = ["-m", "distributed_training", "train", "strategy=ddp", "checkpoint.every_steps=5", "run.progress=off"]
    Path("job.sh").write_text(script(Request(nodes=1, nproc=2, restarts=1), program))

    job = free_port_as_job()
    first = _sbatch(in_tmp, job, DTRAIN_TRAINING__EPOCHS="100000")

    assert first.returncode == 143, first.stderr
    assert "everything is saved" in first.stdout
    assert Path("requeued").read_text() == f"requeue {job}"
    (run,) = Path("runs").iterdir()
    saved = int(max((run / "checkpoints").glob("step-*")).name.partition("-")[2])

    second = _sbatch(in_tmp, job, DTRAIN_TRAINING__EPOCHS=str(saved // 23 + 1))

    assert second.returncode == 0, second.stderr
    assert "Training completed" in second.stdout
    assert list(Path("runs").iterdir()) == [run]
    starts = [e for e in map(json.loads, (run / "events.jsonl").read_text().splitlines()) if e["event"] == "start"]
    assert [start["resumed_from"] for start in starts] == [None, saved]


def _sbatch(folder: Path, job: int, **variables: str) -> subprocess.CompletedProcess[str]:
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    return subprocess.run(
        ["sbatch", "job.sh"],
        capture_output=True,
        text=True,
        timeout=200,
        env=environment(PATH=path, FAKE_JOB_ID=str(job), **variables),
    )


def test_everything_is_quoted_and_a_shell_can_read_it(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = in_tmp / "it's a folder"
    odd.mkdir()
    monkeypatch.chdir(odd)
    request = Request(nodes=2, nproc=4, time="1:00:00", partition="gpu", gpus_per_node="4", more=["--qos=high"])

    text = script(request, ["my script.py", "--name", "a'b $HOME"], python="/opt/python")

    assert subprocess.run(["bash", "-n"], input=text, text=True, timeout=10).returncode == 0
    for line in ("nodes=2", "ntasks-per-node=4", "time=1:00:00", "gpus-per-node=4", "qos=high", "job-name=my-script"):
        assert f"#SBATCH --{line}\n" in text
    echo = text.replace("srun ", "printf '%s|' ")
    said = subprocess.run(
        ["bash"], input=echo, capture_output=True, text=True, timeout=10, env={"PATH": os.environ["PATH"]}
    )
    assert said.stdout == "--kill-on-bad-exit=1|/opt/python|my script.py|--name|a'b $HOME|"
    assert "scontrol" not in text


def test_an_option_cannot_break_out_of_its_line() -> None:
    with pytest.raises(DistributedTrainingError, match="no option for sbatch"):
        script(Request(time="1:00\nrm -rf x"), ["a.py"])
