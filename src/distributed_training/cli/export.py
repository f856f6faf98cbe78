"""`dtrain export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from distributed_training.cli.settings import RunPath, show_logs
from distributed_training.cli.validate import Which

Merge = Annotated[bool, typer.Option("--merge", help="Add LoRA adapters to the weights they belong to.")]


def export(
    run: RunPath,
    to: Annotated[Path, typer.Option(help="Folder for the model.")],
    checkpoint: Which = "best",
    merge: Merge = False,
) -> None:
    """Write a trained Hugging Face model as `save_pretrained` does, for plain transformers to load.

    **Examples**

    `dtrain export runs/text --to my-model`

    `dtrain export runs/text --to my-model --merge --checkpoint last`
    """
    show_logs()
    folder = export_run(run, to, checkpoint, merge)
    typer.echo(f"{folder}: {', '.join(sorted(file.name for file in folder.iterdir()))}")
    typer.echo(f"  dtrain push {run} --repo USER/NAME   puts it on the Hub")


def export_run(run: Path, folder: Path, checkpoint: str, merge: bool, repo: str = "") -> Path:
    """The model of a run's checkpoint, written into a folder."""
    from distributed_training.checkpoint import find_checkpoint
    from distributed_training.cli.trained import load_model
    from distributed_training.huggingface.runs import export

    # One process, whatever the run had: checkpoints fit every strategy.
    with load_model(run, ["training.type=auto", "strategy=single"], checkpoint) as (trainer, used):
        return export(trainer, folder, metrics=find_checkpoint(used).metrics, merge=merge, repo=repo)
