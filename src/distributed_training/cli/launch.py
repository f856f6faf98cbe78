"""`dtrain launch`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from distributed_training.launch.report import Outcome

_ONE, _SEVERAL, _SSH, _MPI, _SLURM = "Processes", "Several machines", "Over ssh", "By mpirun", "Slurm"


def launch(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- COMMAND...", help="A dtrain command, `script.py ...` or `-m module ...`."),
    ] = None,
    nproc: Annotated[
        str, typer.Option(help="Processes on each machine; auto: one a GPU, or one.", rich_help_panel=_ONE)
    ] = "auto",
    max_restarts: Annotated[
        int,
        typer.Option(
            help="How often all start again from the newest checkpoint after a failure.", rich_help_panel=_ONE
        ),
    ] = 0,
    deadline: Annotated[
        float | None,
        typer.Option(help="Longest wait in seconds for other machines and ranks.", rich_help_panel=_ONE),
    ] = None,
    nnodes: Annotated[
        str, typer.Option("--nnodes", "--nodes", help="Machines: 2, or 1:4 for a range.", rich_help_panel=_SEVERAL)
    ] = "1",
    rdzv: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Where the machines meet, in any order.", rich_help_panel=_SEVERAL),
    ] = None,
    master: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Where they meet: the machine with --node-rank 0.", rich_help_panel=_SEVERAL
        ),
    ] = None,
    node_rank: Annotated[
        int, typer.Option(help="Number of this machine, with --master.", rich_help_panel=_SEVERAL)
    ] = 0,
    hosts: Annotated[
        str | None,
        typer.Option(help="Start there: `a,b` or `user@a:4,b:2` with processes.", rich_help_panel=_SSH),
    ] = None,
    remote_python: Annotated[
        str | None, typer.Option(help="Python on the hosts; left out, this one's path.", rich_help_panel=_SSH)
    ] = None,
    ssh: Annotated[str, typer.Option(help="The ssh command, with options of yours.", rich_help_panel=_SSH)] = "ssh",
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="One more variable that the hosts get.", rich_help_panel=_SSH),
    ] = None,
    mpi: Annotated[bool, typer.Option("--mpi", help="Start the ranks by mpirun.", rich_help_panel=_MPI)] = False,
    hostfile: Annotated[
        Path | None,
        typer.Option(help="Machines for mpirun, one a line: `machine1 slots=2`.", rich_help_panel=_MPI),
    ] = None,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="Write a batch script for sbatch.", rich_help_panel=_SLURM)
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="File for the script; left out, the screen.", rich_help_panel=_SLURM)
    ] = None,
    time: Annotated[str | None, typer.Option(help="Time limit, such as 4:00:00.", rich_help_panel=_SLURM)] = None,
    partition: Annotated[str | None, typer.Option(help="Partition.", rich_help_panel=_SLURM)] = None,
    account: Annotated[str | None, typer.Option(help="Account.", rich_help_panel=_SLURM)] = None,
    gpus_per_node: Annotated[str | None, typer.Option(help="GPUs of a machine.", rich_help_panel=_SLURM)] = None,
    cpus_per_task: Annotated[int | None, typer.Option(help="Cores of a process.", rich_help_panel=_SLURM)] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTION", help="Any other line for sbatch, such as --qos=high.", rich_help_panel=_SLURM),
    ] = None,
) -> None:
    """Run a command, or a script of yours, in several processes: here, on many machines, by ssh, mpirun or Slurm.

    A failure on one rank ends all; its traceback comes last. Ctrl-C saves a checkpoint first.

    **Examples**

    `dtrain launch --nproc 2 -- train config.yaml strategy=ddp`

    `dtrain launch --nproc 4 --max-restarts 2 -- my_script.py --width 512`

    `dtrain launch --nnodes 2 --rdzv 10.0.0.1:29400 -- train config.yaml`  (the same on both machines)

    `dtrain launch --hosts gpu1,gpu2 --nproc 4 -- train config.yaml`

    `dtrain launch --mpi --hostfile hosts.txt -- train config.yaml strategy=mpi`

    `dtrain launch --slurm --nodes 2 --nproc 4 --time 4:00:00 --output job.sh -- train config.yaml`
    """
    from distributed_training.launch.program import python_arguments

    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch: its remarks on sockets are no news for users

    known = context.parent.command.list_commands(context) if context.parent else []  # type: ignore[attr-defined]
    program = python_arguments(words or [], set(known) - {context.info_name})
    if slurm:
        from distributed_training.launch import slurm as batch

        request = batch.Request(
            nodes=_machines(nnodes)[1],
            nproc=_count(nproc),
            restarts=max_restarts,
            time=time,
            partition=partition,
            account=account,
            gpus_per_node=gpus_per_node,
            cpus_per_task=cpus_per_task,
            more=sbatch or [],
        )
        _write(batch.script(request, program), output)
        return
    if hosts is not None:
        from distributed_training.launch import ssh as remote

        places = remote.read_hosts(hosts, None if nproc == "auto" else _count(nproc))
        job = remote.Job(
            places, program, ssh, remote_python or sys.executable, master, max_restarts, deadline, env or []
        )
        sys.exit(remote.run(job))
    if mpi or hostfile is not None:
        _refuse_for_mpi(rdzv=rdzv, master=master, max_restarts=max_restarts, nnodes=None if nnodes == "1" else nnodes)
        from distributed_training.launch import mpi as mpirun

        places = mpirun.read_hostfile(hostfile, None if nproc == "auto" else _count(nproc)) if hostfile else []
        python = remote_python or sys.executable
        _end(mpirun.run(mpirun.Job(program, places, _count(nproc), python, deadline, env or [])))
    from distributed_training.launch.local import Launch, run

    _end(run(Launch(program, _count(nproc), _machines(nnodes), node_rank, master, rdzv, max_restarts, deadline)))


def _end(outcome: Outcome) -> NoReturn:
    if outcome.report:
        sys.stderr.write(f"{outcome.report}\n")
    sys.exit(outcome.code)


def _refuse_for_mpi(**options: object) -> None:
    """What torchrun's rendezvous can do and mpirun cannot."""
    from distributed_training.config import ConfigError

    given = [f"--{name.replace('_', '-')}" for name, value in options.items() if value]
    if given:
        raise ConfigError(f"{given[0]} is not for --mpi: mpirun finds its machines by --hostfile, and restarts nothing")


def _count(nproc: str) -> int:
    """Processes of a machine."""
    from distributed_training.config import ConfigError

    if nproc == "auto":
        from distributed_training.launch.local import one_per_gpu

        return one_per_gpu()
    if not nproc.isdigit():
        raise ConfigError(f"--nproc {nproc}: give a number, or auto for one process a GPU")
    return int(nproc)


def _machines(nnodes: str) -> tuple[int, int]:
    """Fewest and most machines: `2` or `1:4`."""
    from distributed_training.config import ConfigError

    fewest, _, most = nnodes.partition(":")
    try:
        count = int(fewest), int(most or fewest)
    except ValueError:
        raise ConfigError(f"--nnodes {nnodes}: give a number such as 2, or a range such as 1:4") from None
    if not 1 <= count[0] <= count[1]:
        raise ConfigError(f"--nnodes {nnodes}: at least one machine, and the smaller number first")
    return count


def _write(text: str, output: Path | None) -> None:
    if output is None:
        typer.echo(text, nl=False)
        return
    output.write_text(text, encoding="utf-8")
    typer.echo(f"{output} written; start it with: sbatch {output}")
