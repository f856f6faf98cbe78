"""A program run to its end, or to its deadline, by the launcher that its strategy needs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from distributed_training.runtime.signals import held_back

_LAUNCHERS = {
    "none": [],
    "dtrain": ["-m", "distributed_training", "launch", "--nproc", "{ranks}", "--"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node={ranks}"],
    "mpirun": ["-m", "distributed_training", "launch", "--mpi", "--nproc", "{ranks}", "--"],
    "horovodrun": ["-m", "horovod.runner.launch", "-np", "{ranks}", sys.executable],
}
_GRACE = 20.0  # seconds that a launcher has to end its ranks
_LINES = 25  # of the output of a run that failed


@dataclass(frozen=True)
class Outcome:
    """How a program ended."""

    problem: str
    """Empty where it ended well."""
    output: list[str]
    """The last lines that it wrote."""


def run_program(
    launcher: str, ranks: int, program: list[str], variables: Mapping[str, str], folder: Path, deadline: float
) -> Outcome:
    """Run `python PROGRAM` in every rank. What it writes goes to `folder`/output.txt."""
    return finish_program(start_program(launcher, ranks, program, variables, folder), folder, deadline)


def finish_program(process: subprocess.Popen[bytes], folder: Path, deadline: float) -> Outcome:
    """Wait for a program that was started in this folder; it is ended at its deadline."""
    try:
        code = process.wait(deadline)
        problem = f"exit code {code}" if code else ""
    except subprocess.TimeoutExpired:
        problem = f"not done after {deadline:g} s (--timeout)"
    finally:
        end_program(process)
    return Outcome(problem, last_lines(folder))


def start_program(
    launcher: str, ranks: int, program: list[str], variables: Mapping[str, str], folder: Path
) -> subprocess.Popen[bytes]:
    """Start `python PROGRAM` in every rank. To be ended by `end_program`, whatever happens."""
    temporary = folder / "temporary"  # launchers leave folders there
    temporary.mkdir(parents=True)
    words = [word.format(ranks=ranks) for word in _LAUNCHERS[launcher]]
    process: subprocess.Popen[bytes] | None = None
    try:
        with (folder / "output.txt").open("wb") as output, held_back():
            process = subprocess.Popen(
                [sys.executable, *words, *program],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "TMPDIR": str(temporary), **variables},
                start_new_session=True,  # so that all of it can be ended, and Ctrl-C is ours to pass on
            )
    except BaseException:
        if process is not None:
            end_program(process)
        raise
    return process


def last_lines(folder: Path) -> list[str]:
    """What a program in this folder wrote last."""
    text = (folder / "output.txt").read_text(encoding="utf-8", errors="replace")
    return text.splitlines()[-_LINES:]


def end_program(process: subprocess.Popen[bytes]) -> None:
    """The launcher first, which ends its ranks; then whatever is left."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
