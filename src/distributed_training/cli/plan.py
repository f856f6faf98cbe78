"""`dtrain plan`."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from distributed_training.cli.counts import counts_and_words
from distributed_training.cli.settings import Words, config_from

_MACHINES, _WHAT = "Machines", "What to compare"


def plan(
    words: Words = None,
    gpus: Annotated[
        list[str] | None,
        typer.Option(help="Numbers of GPUs: `--gpus 1 8 64` or `--gpus 1,8,64`.", rich_help_panel=_WHAT),
    ] = None,
    strategies: Annotated[
        str | None, typer.Option(help="Only these: `ddp,zero3,ddp+powersgd`.", rich_help_panel=_WHAT)
    ] = None,
    scaling: Annotated[
        str,
        typer.Option(
            help="strong: the config's batch is divided among the GPUs. weak: each GPU has such a batch.",
            rich_help_panel=_WHAT,
        ),
    ] = "strong",
    bandwidth: Annotated[
        str | None, typer.Option(help="Of a machine's network: `25Gbit`, `3GB/s`.", rich_help_panel=_MACHINES)
    ] = None,
    latency: Annotated[
        str | None, typer.Option(help="Of a message between machines: `20us`.", rich_help_panel=_MACHINES)
    ] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, help="GPUs of a machine; left out, as here.", rich_help_panel=_MACHINES)
    ] = None,
    intra_bandwidth: Annotated[
        str | None,
        typer.Option(
            help="Between GPUs of a machine: `900GB/s`. Left out, measured where it can be.", rich_help_panel=_MACHINES
        ),
    ] = None,
    device_memory: Annotated[
        str | None, typer.Option(help="Of a GPU: `80GB`; left out, as here.", rich_help_panel=_MACHINES)
    ] = None,
    price: Annotated[
        float | None, typer.Option(min=0.0, help="Of one GPU for an hour, in your currency.", rich_help_panel=_MACHINES)
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Also run what this machine can run, and show the error.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="Write a report: Markdown, with HTML, PNG and JSON beside it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object in place of tables.")] = False,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds that one measurement may take.")] = 600.0,
) -> None:
    """Predict memory, time and cost of a training on other numbers of GPUs, for every strategy.

    Measures the model of the config on this device for some seconds and puts it into the formulas of
    docs/planning.md.

    **Examples**

    `dtrain plan config.yaml --gpus 1 8 64 --bandwidth 25Gbit`

    `dtrain plan config.yaml --gpus 1,2 --measure`

    `dtrain plan config.yaml --gpus 64 --gpus-per-node 8 --intra-bandwidth 900GB/s --bandwidth 400Gbit --price 2.5`

    `dtrain plan config.yaml training.batch_size=4096 --gpus 256 --device-memory 80GB --output reports/plan.md`
    """
    from distributed_training.planning.planner import PlanOptions, make_plan
    from distributed_training.planning.report import markdown, to_dict, write_plan
    from distributed_training.planning.units import read_bandwidth, read_seconds, read_size
    from distributed_training.runtime.signals import interrupting

    counts, rest = counts_and_words(gpus, words)
    options = PlanOptions(
        gpus=counts or PlanOptions().gpus,
        per_node=gpus_per_node,
        bandwidth=read_bandwidth(bandwidth, "--bandwidth") if bandwidth else None,
        intra_bandwidth=read_bandwidth(intra_bandwidth, "--intra-bandwidth") if intra_bandwidth else None,
        latency=read_seconds(latency, "--latency") if latency else None,
        device_memory=read_size(device_memory, "--device-memory") if device_memory else None,
        price=price,
        scaling=scaling,
        strategies=tuple(name.strip() for name in strategies.split(",")) if strategies else (),
        measure=measure,
        timeout=timeout,
        command=" ".join(["dtrain", *sys.argv[1:]]),
        say=lambda line: typer.echo(line, err=True),
    )
    config = config_from(rest)
    with interrupting(signal.SIGTERM):
        made = make_plan(config, options)
    typer.echo(json.dumps(to_dict(made), indent=2) if as_json else markdown(made), nl=as_json)
    if output is not None:
        for file in write_plan(made, output):
            typer.echo(f"wrote {file}", err=True)
