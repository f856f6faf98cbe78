"""`dtrain launch --ray`: its options, and what a command needs on the nodes of the cluster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distributed_training.cli.settings import config_from, split_words, words_to_resume

if TYPE_CHECKING:
    from distributed_training.launch.report import Outcome

_PANEL = "On a Ray cluster"
Ray = Annotated[bool, typer.Option("--ray", help="Start the ranks through Ray Train.", rich_help_panel=_PANEL)]
Address = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="The cluster; left out, RAY_ADDRESS, the one on this machine, or one started here.",
        rich_help_panel=_PANEL,
    ),
]
Workers = Annotated[int | None, typer.Option(help="Ranks, each on a worker of its own.", rich_help_panel=_PANEL)]
MinWorkers = Annotated[
    int | None,
    typer.Option(help="With so few it may begin, and go on when nodes are lost.", rich_help_panel=_PANEL),
]
CpusPerWorker = Annotated[float, typer.Option(help="CPUs that a worker takes.", rich_help_panel=_PANEL)]
GpusPerWorker = Annotated[
    float | None,
    typer.Option(help="GPUs that a worker takes; left out, one if there are so many.", rich_help_panel=_PANEL),
]
Placement = Annotated[
    str, typer.Option(help="pack, spread, strict-pack or strict-spread over the nodes.", rich_help_panel=_PANEL)
]
NodesWithin = Annotated[
    float,
    typer.Option(
        metavar="SECONDS", help="Time in which an autoscaler may bring nodes that lack.", rich_help_panel=_PANEL
    ),
]


@dataclass(frozen=True)
class RayOptions:
    """What was given for `--ray`."""

    address: str | None
    workers: int | None
    min_workers: int | None
    cpus: float
    gpus: float | None
    placement: str
    nodes_within: float


def launch_on_ray(
    context: typer.Context,
    words: list[str],
    program: list[str],
    options: RayOptions,
    restarts: int | None,
    deadline: float | None,
    env: list[str],
) -> Outcome:
    """Check the command here, then run it on the cluster."""
    from distributed_training.config import ConfigError
    from distributed_training.launch import ray_launch

    if options.workers is None:
        raise ConfigError("--ray needs the number of ranks: --workers 8")
    workers = ray_launch.Workers(
        options.workers,
        options.min_workers,
        options.cpus,
        options.gpus,
        options.placement.upper().replace("-", "_"),
    )
    files, root = _needs(context, words)
    return ray_launch.run(
        ray_launch.Job(
            program,
            workers,
            address=options.address,
            restarts=restarts,
            deadline=deadline,
            nodes_within=options.nodes_within,
            more_variables=env,
            files=files,
            root=root,
        )
    )


def refuse_without_ray(options: RayOptions) -> None:
    """Options of Ray that say nothing to other launchers."""
    from distributed_training.config import ConfigError

    for name, value in (("workers", options.workers), ("min-workers", options.min_workers)):
        if value is not None:
            raise ConfigError(f"--{name} is for --ray; other launchers count with --nproc and --nnodes")


def refuse_beside_ray(**options: object) -> None:
    """Options for what Ray decides itself."""
    from distributed_training.config import ConfigError

    given = [f"--{name}" for name, value in options.items() if value]
    if given:
        raise ConfigError(f"{given[0]} is not for --ray: Ray places the ranks; give their number with --workers")


def _needs(context: typer.Context, words: list[str]) -> tuple[list[Path], Path | None]:
    """(files that every node must have, where runs go if that is known). A mistake in the config shows here."""
    from distributed_training.config.load import default_file

    if words[0].endswith(".py"):
        return [Path(words[0])], None
    given = _parsed(context, words)
    if given is None:
        return [], None
    resumed = words_to_resume(given["words"], given.get("resume"))
    config = config_from(resumed)
    file = split_words(resumed)[0] or default_file()
    return [Path(file)] if file else [], Path(config.run.root)


def _parsed(context: typer.Context, words: list[str]) -> dict[str, Any] | None:
    """The arguments of a command of ours that takes a config; None for others."""
    group: Any = context.parent.command if context.parent else None
    command = group.get_command(context.parent, words[0]) if group is not None else None
    if command is None or not any(parameter.name == "words" for parameter in command.params):
        return None
    with command.make_context(words[0], list(words[1:]), parent=context.parent) as parsed:
        return dict(parsed.params)
