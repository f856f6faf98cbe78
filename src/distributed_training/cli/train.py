"""`dtrain train`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from distributed_training.cli.settings import Words, config_from, show_logs, words_to_resume

if TYPE_CHECKING:
    from distributed_training.config import Config

Resume = Annotated[
    str | None,
    typer.Option(help="`auto` goes on from the newest good checkpoint; or the path of a run or checkpoint."),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say more about what is going on.")]


def train(
    words: Words = None,
    resume: Resume = None,
    split: Annotated[
        bool, typer.Option("--split", help="Load in a process of its own, as a CPU machine would for a GPU elsewhere.")
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Train a model.

    Without any word it trains the embedded job: a classifier of handwritten digits.

    **Examples**

    `dtrain train`

    `dtrain train model=resnet18 data.dataset=cifar10 data.root=~/data training.epochs=20`

    `dtrain train config.yaml training.lr=0.01 tracking.trackers=[tensorboard]`

    `dtrain train --resume auto`  (the same command again, after an interruption)

    `dtrain train --split`  (what `dtrain serve` and `dtrain feed` do on two machines)
    """
    words = words_to_resume(words, resume)
    config = config_from(words)
    show_logs(verbose)
    if split:
        _train_split(config, words)
        return
    from distributed_training.cli.ending import exit_code, say_goodbye
    from distributed_training.training.job import build_job

    with build_job(config) as job:
        result = job.train()
        leads = job.trainer.strategy.rank == 0
    if leads:
        say_goodbye(result, config.training.epochs, model=config.model.name)
    elif result.status == "interrupted":
        sys.exit(exit_code(result))


def _train_split(config: Config, words: list[str]) -> None:
    """A GPU side and a loader, on this machine and on a port that is free."""
    from contextlib import ExitStack

    from distributed_training.cli.serve import say_goodbye_with_figures
    from distributed_training.split.serving import Serving
    from distributed_training.split.together import LoaderBeside

    here = config.replace(**{"network.gpu_host": "127.0.0.1"})
    with ExitStack() as stack:
        serving = stack.enter_context(Serving(here, port=0))
        if serving.leads:
            stack.enter_context(LoaderBeside(serving, words))
        result = serving.train()
    say_goodbye_with_figures(serving, result, "train --split")
