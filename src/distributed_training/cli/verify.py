"""`dtrain verify`."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distributed_training.cli.settings import split_words

if TYPE_CHECKING:
    from distributed_training.verify.report import Report
    from distributed_training.verify.subject import Subject

VerifyWords = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG] [KEY=VALUE]... [-- SCRIPT.py ARGS]",
        help="A YAML file and settings, as for `train`; or a script that has a Trainer, after `--`.",
    ),
]


def verify(
    words: VerifyWords = None,
    strategies: Annotated[
        str | None,
        typer.Option(
            help="Names with commas between: `ddp,zero3,ddp+powersgd`. Left out: all. What follows a `+` is a kind of "
            "compression, or a setting of the strategy: `deepspeed+zero_stage=3`."
        ),
    ] = None,
    nproc: Annotated[int, typer.Option(min=1, help="Processes of each strategy that has several.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps to compare.")] = 20,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Relative difference allowed where rounding does not explain more.")
    ] = 1e-6,
    markdown: Annotated[Path | None, typer.Option(help="Write the table to this file too.")] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write all that was found to this file.")] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Keep weights, differences and outputs of all runs in this new folder.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds that one run may take.")] = 600.0,
) -> None:
    """Prove that a training is the same under other strategies.

    Trains some steps with `single` and then with each strategy, on the same batches, and compares losses and weights
    after every step. Ends with code 1 if one of them is not the same training.

    **Examples**

    `dtrain verify config.yaml --strategies ddp,zero3 --nproc 2 --steps 20`

    `dtrain verify --strategies ddp,ddp+powersgd training.optimizer=sgd --markdown verify.md`

    `dtrain verify --strategies ddp -- train.py --data ~/data`
    """
    from distributed_training.runtime.signals import interrupting
    from distributed_training.verify.verification import Settings
    from distributed_training.verify.verification import verify as verify_strategies

    with interrupting(signal.SIGTERM):
        report = verify_strategies(
            _subject(words or []),
            [name.strip() for name in strategies.split(",")] if strategies is not None else None,
            Settings(nproc, steps, tolerance, folder, timeout),
            say=lambda line: typer.echo(line, err=True),
        )
    _show(report, markdown, as_json)
    raise typer.Exit(0 if report.passed else 1)


def _subject(words: list[str]) -> Subject:
    """A word that ends in .py begins a program; what is before it are settings."""
    from distributed_training.verify.subject import Subject

    at = next((i for i, word in enumerate(words) if word.endswith(".py") and "=" not in word), len(words))
    config, settings = split_words(words[:at])
    return Subject(config, settings, words[at:])


def _show(report: Report, markdown: Path | None, as_json: Path | None) -> None:
    for row in report.rows:
        for line in row.output:
            typer.echo(f"{row.strategy}: {line}", err=True)
    table = report.markdown()
    typer.echo(table, nl=False)
    if markdown is not None:
        markdown.write_text(table, encoding="utf-8")
    if as_json is not None:
        as_json.write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
