"""A batch script for Slurm. `srun` starts the ranks, and `runtime/world.py` reads its variables."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path

from distributed_training.config.errors import ConfigError

_TO_SAVE = 120  # seconds before the time limit at which the ranks are told to save


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the job asks of Slurm."""

    nodes: int = 1
    nproc: int = 1
    restarts: int = 0
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    gpus_per_node: str | None = None
    cpus_per_task: int | None = None
    more: list[str] = field(default_factory=list)


def script(request: Request, program: list[str], python: str = sys.executable) -> str:
    """The script as text. The same job, requeued, goes on from the newest good checkpoint of its run."""
    options = {
        "job-name": _name(program),
        "nodes": request.nodes,
        "ntasks-per-node": request.nproc,
        "gpus-per-node": request.gpus_per_node,
        "cpus-per-task": request.cpus_per_task,
        "time": request.time,
        "partition": request.partition,
        "account": request.account,
        "output": "%x-%j.log",
        "open-mode": "append",
        "signal": f"TERM@{_TO_SAVE}",
    }
    words = [f"--{name}={value}" for name, value in options.items() if value is not None]
    words += ["--requeue", *request.more]
    for word in words:
        if not word.startswith("-") or any(c.isspace() for c in word):
            raise ConfigError(f"{word!r} is no option for sbatch: write it as --name=value, without spaces")
    command = shlex.join([python, *program])
    return _SCRIPT.format(
        options="\n".join(f"#SBATCH {word}" for word in words),
        saving=_TO_SAVE,
        folder=shlex.quote(str(Path.cwd())),
        command=command,
        again=_AGAIN.format(restarts=request.restarts) if request.restarts else "",
    )


def _name(program: list[str]) -> str:
    """A name for the queue: `dtrain-train`, or that of the script or module."""
    if program[:2] == ["-m", "distributed_training"]:
        return f"dtrain-{program[2]}"
    name = Path(program[1] if program[0] == "-m" else program[0]).name.removesuffix(".py")
    return "-".join(name.split())


_SCRIPT = """#!/bin/bash
{options}
#
# {saving} s before the time limit, and when the job is preempted, the ranks get SIGTERM: they save and end.
# A requeued job goes on from there. A failure on one rank ends all.
cd {folder} || exit 1
# One process has the cores that Slurm gave it; a value of your own is kept.
export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-${{SLURM_CPUS_PER_TASK:-1}}}}"
srun --kill-on-bad-exit=1 ${{SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}} {command}
code=$?
{again}exit $code
"""

_AGAIN = """# 143: ended by SIGTERM with everything saved.
if [ "$code" -eq 143 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {restarts} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
"""
