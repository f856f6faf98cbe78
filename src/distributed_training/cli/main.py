"""`dtrain`: the command line. One file for each command; nothing heavy is imported before it is needed."""

from __future__ import annotations

import sys

import typer

from distributed_training.cli import config, predict, report, train, validate, version
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
""",
)
for command in (train, validate, predict, report, version):
    app.command()(getattr(command, command.__name__.rpartition(".")[2]))
app.add_typer(config.app, name="config")


def main() -> None:
    """Run a command. A user's mistake ends with one clear line, never with a traceback."""
    keep_waits_short()
    try:
        app(standalone_mode=True)
    except DistributedTrainingError as error:
        failure.tell_others(error)
        failure.record_for_launcher(error)
        sys.stderr.write(f"{failure.headline() or 'error: '}{error}\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
