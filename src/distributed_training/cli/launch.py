"""`dtrain launch`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from distributed_training.cli import launch_ray
from distributed_training.cli import launch_sagemaker as sm

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
        int | None,
        typer.Option(
            "--max-restarts",
            "--restarts",
            help="How often all start again from the newest checkpoint after a failure.",
            rich_help_panel=_ONE,
        ),
    ] = None,
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
        typer.Option(
            metavar="NAME",
            help="One more variable that the hosts get; SageMaker takes NAME=VALUE too.",
            rich_help_panel=_SSH,
        ),
    ] = None,
    mpi: Annotated[bool, typer.Option("--mpi", help="Start the ranks by mpirun.", rich_help_panel=_MPI)] = False,
    hostfile: Annotated[
        Path | None,
        typer.Option(help="Machines for mpirun, one a line: `machine1 slots=2`.", rich_help_panel=_MPI),
    ] = None,
    ray: launch_ray.Ray = False,
    address: launch_ray.Address = None,
    workers: launch_ray.Workers = None,
    min_workers: launch_ray.MinWorkers = None,
    cpus_per_worker: launch_ray.CpusPerWorker = 1.0,
    gpus_per_worker: launch_ray.GpusPerWorker = None,
    placement: launch_ray.Placement = "pack",
    nodes_within: launch_ray.NodesWithin = 0.0,
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
    sagemaker: sm.On = False,
    instance_type: sm.InstanceType = None,
    instances: sm.Instances = None,
    role: sm.Role = None,
    image: sm.Image = None,
    framework: sm.Framework = None,
    framework_version: sm.FrameworkVersion = None,
    spot: sm.Spot = False,
    max_run: sm.MaxRun = None,
    max_wait: sm.MaxWait = None,
    bucket: sm.Bucket = None,
    region: sm.Region = None,
    job_name: sm.JobName = None,
    data: sm.Data = None,
    checkpoints: sm.Checkpoints = None,
    secret: sm.Secret = None,
    no_wait: sm.NoWait = False,
    dry_run: sm.DryRun = False,
    attach: sm.Attach = None,
    stop: sm.Stop = None,
) -> None:
    """Run a command, or a script of yours, in several processes: here, on many machines, by ssh, mpirun, Ray, Slurm or
    Amazon SageMaker.

    A failure on one rank ends all; its traceback comes last. Ctrl-C saves a checkpoint first.

    **Examples**

    `dtrain launch --nproc 2 -- train config.yaml strategy=ddp`

    `dtrain launch --nproc 4 --max-restarts 2 -- my_script.py --width 512`

    `dtrain launch --nnodes 2 --rdzv 10.0.0.1:29400 -- train config.yaml`  (the same on both machines)

    `dtrain launch --hosts gpu1,gpu2 --nproc 4 -- train config.yaml`

    `dtrain launch --mpi --hostfile hosts.txt -- train config.yaml strategy=mpi`

    `dtrain launch --ray --address 10.0.0.1:6379 --workers 8 -- train config.yaml strategy=ddp`

    `dtrain launch --slurm --nodes 2 --nproc 4 --time 4:00:00 --output job.sh -- train config.yaml`

    `dtrain launch --sagemaker --instance-type ml.g5.xlarge --role ARN --spot -- train config.yaml`
    """
    from distributed_training.launch.program import python_arguments

    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch: its remarks on sockets are no news for users

    if sagemaker and attach is not None:
        sys.exit(sm.attach(attach, region))
    if sagemaker and stop is not None:
        return sm.stop(stop, region)
    known = context.parent.command.list_commands(context) if context.parent else []  # type: ignore[attr-defined]
    program = python_arguments(words or [], set(known) - {context.info_name})
    on_ray = launch_ray.RayOptions(
        address, workers, min_workers, cpus_per_worker, gpus_per_worker, placement, nodes_within
    )
    if ray:
        launch_ray.refuse_beside_ray(rdzv=rdzv, master=master, hosts=hosts, nproc=None if nproc == "auto" else nproc)
        _end(launch_ray.launch_on_ray(context, words or [], program, on_ray, max_restarts, deadline, env or []))
    launch_ray.refuse_without_ray(on_ray)
    restarts = max_restarts or 0
    job_settings = {
        "instance_type": instance_type,
        "instances": instances,
        "role": role,
        "image": image,
        "framework": framework,
        "framework_version": framework_version,
        "spot": spot or None,
        "max_run": max_run,
        "max_wait": max_wait,
        "bucket": bucket,
        "region": region,
        "checkpoints": checkpoints,
    }
    if sagemaker:
        several = None if nnodes == "1" else nnodes
        sm.refuse_with_sagemaker(rdzv=rdzv, master=master, hosts=hosts, hostfile=hostfile, mpi=mpi, nnodes=several)
        wishes = sm.Wishes(
            words=words or [],
            program=program,
            settings=job_settings,
            job_name=job_name,
            data=data or [],
            secrets=secret or [],
            env=env or [],
            nproc=nproc,
            max_restarts=restarts,
            deadline=deadline,
            wait=not no_wait,
            dry_run=dry_run,
        )
        commands = getattr(context.parent.command, "commands", {}) if context.parent else {}
        sys.exit(sm.launch_on_sagemaker(wishes, commands.get((words or [""])[0])))
    sm.refuse_without_sagemaker(**job_settings, data=data, secret=secret, dry_run=dry_run, attach=attach, stop=stop)
    if slurm:
        from distributed_training.launch import slurm as batch

        request = batch.Request(
            nodes=_machines(nnodes)[1],
            nproc=_count(nproc),
            restarts=restarts,
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
        job = remote.Job(places, program, ssh, remote_python or sys.executable, master, restarts, deadline, env or [])
        sys.exit(remote.run(job))
    if mpi or hostfile is not None:
        _refuse_for_mpi(rdzv=rdzv, master=master, max_restarts=restarts, nnodes=None if nnodes == "1" else nnodes)
        from distributed_training.launch import mpi as mpirun

        places = mpirun.read_hostfile(hostfile, None if nproc == "auto" else _count(nproc)) if hostfile else []
        python = remote_python or sys.executable
        _end(mpirun.run(mpirun.Job(program, places, _count(nproc), python, deadline, env or [])))
    from distributed_training.launch.local import Launch, run

    _end(run(Launch(program, _count(nproc), _machines(nnodes), node_rank, master, rdzv, restarts, deadline)))


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
