"""`dtrain push`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from distributed_training.cli.export import Merge, export_run
from distributed_training.cli.settings import RunPath, show_logs
from distributed_training.cli.validate import Which


def push(
    run: RunPath,
    repo: Annotated[str, typer.Option(help="Repository on the Hub, `user/name`; made if it is not there.")],
    private: Annotated[bool, typer.Option("--private", help="A new repository is seen by its owner only.")] = False,
    checkpoint: Which = "best",
    merge: Merge = False,
    message: Annotated[str, typer.Option(help="What the commit says.")] = "Upload model",
) -> None:
    """Publish a trained Hugging Face model with a model card. The token is read from HF_TOKEN or `.env`.

    RUN may also be a folder that `dtrain export` wrote.

    **Example**

    `dtrain push runs/text --repo me/my-model --private`
    """
    from distributed_training.config.load import export_dotenv
    from distributed_training.huggingface.publish import check_ready
    from distributed_training.huggingface.publish import push as publish

    show_logs()
    export_dotenv()
    check_ready(repo)  # before the model is made
    if (run / "config.json").is_file() or (run / "adapter_config.json").is_file():
        typer.echo(publish(run, repo, private=private, message=message))
        return
    with tempfile.TemporaryDirectory(prefix="dtrain-push-") as temporary:
        folder = export_run(run, Path(temporary) / "model", checkpoint, merge, repo)
        typer.echo(publish(folder, repo, private=private, message=message))
