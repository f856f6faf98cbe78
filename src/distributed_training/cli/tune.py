"""`dtrain tune`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distributed_training.cli.settings import Words, config_from, show_logs, split_words
from distributed_training.cli.train import Verbose

if TYPE_CHECKING:
    from distributed_training.config import Config
    from distributed_training.tuning.records import Search, SearchFolder, Trial

_EACH, _CLUSTER = "Each trial", "Cluster"


def tune(
    words: Words = None,
    samples: Annotated[int | None, typer.Option(help="How many trials.")] = None,
    max_concurrent: Annotated[
        int | None, typer.Option(help="Trials at a time; left out, what there is room for.")
    ] = None,
    algorithm: Annotated[str | None, typer.Option(help="bayesian, random or grid.")] = None,
    scheduler: Annotated[str | None, typer.Option(help="asha, pbt or none.")] = None,
    time_budget: Annotated[str | None, typer.Option(help="End with what there is after 30m, 1h30m, ...")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the values that are tried.")] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Go on with a search that was interrupted.")
    ] = None,
    workers_per_trial: Annotated[
        int | None, typer.Option(help="Processes that train together.", rich_help_panel=_EACH)
    ] = None,
    gpus_per_trial: Annotated[float | None, typer.Option(help="GPUs, 0.5 too.", rich_help_panel=_EACH)] = None,
    cpus_per_worker: Annotated[float | None, typer.Option(help="CPUs of a process.", rich_help_panel=_EACH)] = None,
    address: Annotated[
        str | None, typer.Option(help="A Ray cluster: auto or HOST:PORT.", rich_help_panel=_CLUSTER)
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Search for the best settings: many trials of one config, chosen and ended by how they go.

    What is searched is the section `tuning.space` of the config.

    **Examples**

    `dtrain tune config.yaml --samples 50 --max-concurrent 2`

    `dtrain tune config.yaml 'tuning.space.training.lr={loguniform: [0.0001, 0.1]}' tuning.objectives.val_accuracy=max`

    `dtrain tune config.yaml --algorithm grid --scheduler none`

    `dtrain tune config.yaml --scheduler pbt --samples 8 --gpus-per-trial 0.5`

    `dtrain tune --resume runs/NAME`  (after an interruption)

    `dtrain train runs/NAME/best.yaml`  (trains with the best settings)
    """
    given = {
        "samples": samples,
        "max_concurrent": max_concurrent,
        "algorithm": algorithm,
        "scheduler": scheduler,
        "time_budget": time_budget,
        "seed": seed,
        "workers_per_trial": workers_per_trial,
        "gpus_per_trial": gpus_per_trial,
        "cpus_per_worker": cpus_per_worker,
        "address": address,
    }
    options = [f"tuning.{name}={value}" for name, value in given.items() if value is not None]
    show_logs(verbose)
    config = _config([*(words or []), *options], resume)
    from distributed_training.tuning import search
    from distributed_training.tuning.finish import finish

    plan = search.plan_of(config)
    _, folder = search.run(plan) if resume is None else search.resume(plan, resume)
    best, page = finish(folder, config)
    _say_goodbye(folder, folder.load(), best, page)


def _config(words: list[str], resume: Path | None) -> Config:
    """The config of the words; for a search that goes on, the one that it began with, unless another is named."""
    if resume is None or split_words(words)[0] is not None:
        return config_from(words)
    from distributed_training.config.load import export_dotenv, load_config
    from distributed_training.runtime.errors import RunDirectoryError
    from distributed_training.tuning.records import SearchFolder
    from distributed_training.tuning.search import SETTINGS

    export_dotenv()
    SearchFolder(resume).load()  # says so if it is none
    file = resume / SETTINGS
    if not file.is_file():
        raise RunDirectoryError(
            f"{resume}: this search is over a function in Python; go on with it there: HPORunner(...).resume(FOLDER)"
        )
    return load_config(file, words, environ={})


def _say_goodbye(folder: SearchFolder, search: Search, best: Trial | None, page: Any) -> None:
    from distributed_training.tuning.standings import count_text

    place = folder.path.relative_to(Path.cwd()) if folder.path.is_relative_to(Path.cwd()) else folder.path
    say = typer.echo
    say("")
    say(f"Search {search.status}: {count_text(folder.trials()) or 'no trial'}")
    if best is not None:
        say(f"  best trial         {best.id}, {search.metric} {best.value(search.metric):.6g}")
        for name, value in best.parameters.items():
            say(f"    {name} = {value:.6g}" if isinstance(value, float) else f"    {name} = {value}")
        say(f"  its settings       {place / folder.best_file.name}")
    if page is not None:
        say(f"  report             {place / page.relative_to(folder.path)}")
    say(f"  trials             {place / folder.trials_file.name}")
    if search.status == "interrupted":
        say(f"  go on              dtrain tune --resume {place}")
        sys.exit(128 + signal.Signals[search.signal or "SIGINT"])
    if best is not None:
        say("")
        say("Try next:")
        say(f"  dtrain train {place / folder.best_file.name}      train with the best settings")
        if best.directory:
            say(f"  dtrain validate {place / best.directory}      evaluate the best trial's checkpoint")
