"""`dtrain`: the command line. One file for each command; nothing heavy is imported before it is needed."""

from __future__ import annotations

import sys

import typer

from distributed_training.cli import (
    audit,
    bench,
    config,
    doctor,
    export,
    feed,
    launch,
    native,
    plan,
    predict,
    push,
    report,
    serve,
    train,
    tune,
    validate,
    verify,
    version,
)
from distributed_training.config.errors import DistributedTrainingError
from distributed_training.runtime import failure
from distributed_training.runtime.threads import keep_waits_short

app = typer.Typer(
    name="dtrain",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""
Train PyTorch models, the same way on a laptop and on many machines.

**First steps**

`dtrain train` trains the embedded digit classifier in seconds

`dtrain config init` writes a commented config.yaml to start from

`dtrain train config.yaml training.epochs=5` trains your own, with one setting changed

`dtrain train --resume auto` goes on where a run was interrupted

`dtrain report runs/NAME` draws its curves

`dtrain verify config.yaml --strategies ddp` proves that two processes train the same

`dtrain launch --nproc 2 -- train config.yaml` trains in two processes

`dtrain plan config.yaml --gpus 1 8 64 --bandwidth 25Gbit` predicts memory, time and cost on other numbers of GPUs

`dtrain bench scaling --gpus 1 2 4` measures how it scales here

`dtrain tune config.yaml --samples 50` searches for the best settings

`dtrain serve config.yaml` on a GPU server trains on what `dtrain feed config.yaml --to LINK` loads where the data is
""",
)
for command in (
    train,
    tune,
    serve,
    feed,
    validate,
    predict,
    report,
    export,
    push,
    verify,
    audit,
    plan,
    doctor,
    version,
):
    app.command()(getattr(command, command.__name__.rpartition(".")[2]))
# What comes after the command to launch belongs to it, with or without `--` before it.
app.command(context_settings={"allow_interspersed_args": False})(launch.launch)
app.add_typer(bench.app, name="bench")
app.add_typer(config.app, name="config")
app.add_typer(native.app, name="native")


def main() -> None:
    """Run a command. A user's mistake ends with one clear line, never with a traceback."""
    keep_waits_short()
    try:
        app(standalone_mode=True)
    except DistributedTrainingError as error:
        failure.report(error, error.exit_code)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
