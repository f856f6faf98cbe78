"""The last lines of a training: what came out, where it is, what to try next."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from distributed_training.training import TrainingResult


def exit_code(result: TrainingResult) -> int:
    """That of an interrupted training."""
    return 130 if signal.SIGINT.name in result.reason else 143


def say_goodbye(
    result: TrainingResult, epochs: int, command: str = "train", more: Sequence[str] = (), model: str = ""
) -> None:
    """Say how a training of a named model ended; `command` goes on with it, `more` are lines of its own.

    Exits if interrupted.
    """
    from distributed_training.bench.report import write_report
    from distributed_training.runtime.errors import MissingDependencyError
    from distributed_training.runtime.run_directory import RunDirectory

    assert result.run_dir is not None
    folder = result.run_dir
    if folder.is_absolute() and folder.is_relative_to(Path.cwd()):
        folder = folder.relative_to(Path.cwd())
    say = typer.echo
    page: Path | str
    try:
        page = write_report(RunDirectory(folder))
    except MissingDependencyError as error:
        page = str(error)
    say("")
    if result.status == "interrupted":
        say(f"Interrupted ({result.reason}) after {result.steps} steps; everything is saved.")
        say(f"  go on      dtrain {command} --resume {folder}")
        sys.exit(exit_code(result))
    reason = f": {result.reason}" if result.reason else ""
    say(f"Training {result.status}{reason} ({result.epochs} epochs, {result.steps} steps, {result.seconds:.1f} s)")
    if "val_accuracy" in result.metrics:
        say(f"  held-out accuracy  {result.metrics['val_accuracy']:.4f}")
    if "val_loss" in result.metrics:
        say(f"  held-out loss      {result.metrics['val_loss']:.4f}")
    for line in more:
        say(line)
    say(f"  run directory      {folder}")
    say(f"  report             {page}")
    say("")
    say("Try next:")
    say(f"  dtrain validate {folder}                      evaluate the best checkpoint")
    say(f"  dtrain predict {folder} --output out.csv      predict with it")
    say(f"  dtrain {command} --resume {folder} training.epochs={epochs * 2}   train it longer")
    if model == "huggingface":
        say(f"  dtrain push {folder} --repo USER/NAME         publish it on the Hugging Face Hub")
    say("  dtrain config init                       write a config.yaml for your own data and model")
