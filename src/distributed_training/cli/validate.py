"""`dtrain validate`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from distributed_training.cli.remote import To, validate_remotely
from distributed_training.cli.settings import Overrides, RunPath, show_logs

Which = Annotated[str, typer.Option("--checkpoint", help="`best`, `last`, or the path of a checkpoint.")]


def validate(
    run: RunPath,
    words: Overrides = None,
    checkpoint: Which = "best",
    to: To = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Evaluate a trained model on its held-out data, or on other data.

    **Examples**

    `dtrain validate runs/NAME`

    `dtrain validate runs/NAME --checkpoint last --json`

    `dtrain validate runs/NAME data.root=other.csv data.validation_fraction=0.5`

    `dtrain validate config.yaml --to LINK`  (the model is on a GPU side: `dtrain serve RUN --mode validation`)
    """
    show_logs()
    if to is not None:
        validate_remotely(run, words, to, as_json=as_json)
        return
    from distributed_training.cli.trained import load_trained

    with load_trained(run, words, checkpoint) as (job, data, path):
        metrics = job.trainer.evaluate(data)
        samples = data.plan.samples
    if as_json:
        typer.echo(json.dumps({"checkpoint": str(path), "samples": samples, **metrics}))
        return
    typer.echo(f"{path}, {samples} samples")
    for name, value in metrics.items():
        typer.echo(f"  {name:<10} {value:.4f}")
