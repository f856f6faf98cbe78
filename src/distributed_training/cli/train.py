"""`dtrain train`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distributed_training.cli.settings import Words, config_from, config_of_run, show_logs, split_words

if TYPE_CHECKING:
    from distributed_training.config import Config
    from distributed_training.training import TrainingResult


def train(
    words: Words = None,
    resume: Annotated[
        str | None,
        typer.Option(help="`auto` goes on from the newest good checkpoint; or the path of a run or checkpoint."),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say more about what is going on.")] = False,
) -> None:
    """Train a model.

    Without any word it trains the embedded job: a classifier of handwritten digits.

    **Examples**

    `dtrain train`

    `dtrain train model=resnet18 data.dataset=cifar10 data.root=~/data training.epochs=20`

    `dtrain train config.yaml training.lr=0.01 tracking.trackers=[tensorboard]`

    `dtrain train --resume auto`  (the same command again, after an interruption)
    """
    config = _config(words, resume)
    from distributed_training.training.job import build_job

    show_logs(verbose)
    with build_job(config) as job:
        result = job.train()
        leads = job.trainer.strategy.rank == 0
    if leads:
        _say_goodbye(result, config.training.epochs)
    elif result.status == "interrupted":
        sys.exit(_exit_code(result))


def _config(words: list[str] | None, resume: str | None) -> Config:
    """A resume without a config file goes on with the run's own settings."""
    from distributed_training.runtime.run_directory import RunDirectory, newest_run

    path, overrides = split_words(words)
    if resume is None or path is not None:
        return config_from([*(words or []), *([f"checkpoint.resume={resume}"] if resume else [])])
    run: RunDirectory | None = None
    if resume == "auto":
        run = newest_run(config_from(overrides), any_job=not overrides)
    else:
        folders = [RunDirectory(folder) for folder in (Path(resume), *Path(resume).resolve().parents[:2])]
        run = next((folder for folder in folders if folder.config_file.is_file()), None)
    if run is None:
        return config_from([*overrides, f"checkpoint.resume={resume}"])
    config = config_of_run(run, [*overrides, f"checkpoint.resume={resume}"])
    if resume == "auto":  # the very run that was found, whatever its name
        config = config_of_run(run, [*overrides, f"checkpoint.resume={run.path}"])
    return config


def _exit_code(result: TrainingResult) -> int:
    return 130 if signal.SIGINT.name in result.reason else 143


def _say_goodbye(result: TrainingResult, epochs: int) -> None:
    """The last lines: what came out, where it is, what to try next."""
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
        say(f"  go on      dtrain train --resume {folder}")
        sys.exit(_exit_code(result))
    reason = f": {result.reason}" if result.reason else ""
    say(f"Training {result.status}{reason} ({result.epochs} epochs, {result.steps} steps, {result.seconds:.1f} s)")
    if "val_accuracy" in result.metrics:
        say(f"  held-out accuracy  {result.metrics['val_accuracy']:.4f}")
    if "val_loss" in result.metrics:
        say(f"  held-out loss      {result.metrics['val_loss']:.4f}")
    say(f"  run directory      {folder}")
    say(f"  report             {page}")
    say("")
    say("Try next:")
    say(f"  dtrain validate {folder}                      evaluate the best checkpoint")
    say(f"  dtrain predict {folder} --output out.csv      predict with it")
    say(f"  dtrain train --resume {folder} training.epochs={epochs * 2}   train it longer")
    say("  dtrain config init                       write a config.yaml for your own data and model")
