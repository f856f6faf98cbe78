"""One trial, as it runs on a Ray worker: an ordinary run of the config with the trial's parameters in place."""

from __future__ import annotations

import functools
import itertools
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distributed_training.config import Config
from distributed_training.runtime.run_directory import RunDirectory
from distributed_training.tuning import exchange
from distributed_training.tuning.parameters import Parameters

_ENDED = "ended by the search"


@dataclass(frozen=True)
class Task:
    """What all trials of a search share. Made by the driver, sent to every worker."""

    folder: str
    """The search's folder; trials have theirs below it."""
    directory: str
    """Working directory of the driver: relative paths and modules of the user's are looked for there."""
    config: Config | None = None
    """Settings of the trials; None: the user's function has none of ours."""
    function: Callable[[Any], Any] | None = None
    """The user's own training; None: an ordinary run."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """What the user's function gets beside the parameters."""
    exchange_every: int | None = None
    """Population-based training: epochs between two checkpoints that other trials may go on from."""
    workers: int = 1
    resources: Mapping[str, float] = field(default_factory=dict)
    """What each of the workers takes."""
    feed: str | None = None
    """The feed that all trials share, if they do."""

    @property
    def trials(self) -> Path:
        """Where the run directories of the trials are."""
        return Path(self.folder) / "trials"


def run_trial(parameters: dict[str, Any], task: Task) -> Any:
    """What Ray calls on a worker, in a thread of its own, for every trial and after every interruption of one."""
    from ray import tune

    context = tune.get_context()
    name = str(context.get_trial_name())
    # Ray goes into a folder of the trial, and a worker that is used again must find everything as the first did.
    os.chdir(task.directory)
    if task.directory not in sys.path:
        sys.path.insert(0, task.directory)
    if task.function is not None:
        given = (
            Parameters({**task.constants, **parameters}) if task.config is None else task.config.replace(**parameters)
        )
        return task.function(given)
    from distributed_training.config.load import export_dotenv

    export_dotenv()
    return _run(parameters, task, name)


def _run(parameters: dict[str, Any], task: Task, name: str) -> None:
    start = exchange.find_start(task.trials, name, tune_checkpoint()) if task.exchange_every else None
    run_dir = start.directory if start is not None else task.trials / name
    config = trial_config(task, parameters, resume=start.resume if start is not None else "auto")
    if start is None:
        _make_way(run_dir, config)
    if task.workers > 1:
        from distributed_training.tuning.ranks import train_on_ranks

        train_on_ranks(config, run_dir, task, name)
        return
    from distributed_training.training.job import build_job
    from distributed_training.tuning.reporter import Reporter
    from distributed_training.tuning.shared_feed import SharedData

    load = functools.partial(load_once, config)
    told = Told(task, name)
    with SharedData(task.feed, config, load) as shared, build_job(config, run_dir, shared.splits or load()) as job:
        job.trainer.callbacks.append(Reporter(told, task.exchange_every))
        job.train()
    told.leave()


def trial_config(task: Task, parameters: Mapping[str, Any], resume: str) -> Config:
    """The settings of one trial."""
    assert task.config is not None
    config = task.config
    changes: dict[str, Any] = {**parameters, "checkpoint.resume": resume, "run.progress": "off"}
    if config.run.threads is None:
        changes["run.threads"] = max(1, int(task.resources.get("CPU", 1)))
    if config.training.device == "auto" and not task.resources.get("GPU"):
        changes["training.device"] = "cpu"  # a GPU that is there is not this trial's
    if config.tracking.group is None:
        changes["tracking.group"] = Path(task.folder).name
    if task.exchange_every:
        changes["checkpoint.background"] = False  # a checkpoint that is told of must be there
    return config.replace(**changes)


def _make_way(run_dir: Path, config: Config) -> None:
    """Put a run of this name with other settings aside.

    A search whose driver is killed may have forgotten its newest trials, and Optuna may then suggest other values.
    """
    run = RunDirectory(run_dir)
    if not run.config_file.is_file():
        return
    saved = run.load_config()
    if any(getattr(saved, part) != getattr(config, part) for part in ("model", "training", "data", "strategy")):
        names = (run_dir.with_name(f"{run_dir.name}-forgotten-{n}") for n in itertools.count(1))
        run_dir.rename(next(name for name in names if not name.exists()))


def load_once(config: Config) -> Any:
    """The data of a trial: loaded once by each worker, for all trials that it runs."""
    return _data(json.dumps(config.to_dict()["data"], sort_keys=True, default=str))


@functools.lru_cache(maxsize=1)
def _data(section: str) -> Any:
    from distributed_training.training.job import load_data

    return load_data(Config.from_dict({"data": json.loads(section)}, source="the search"))


class Told:
    """Reports to Ray, and knows whether Ray has ended the trial."""

    def __init__(self, task: Task, name: str) -> None:
        self._task, self._name = task, name
        self.ended = False

    def __call__(self, metrics: dict[str, Any], checkpoint: Path | None) -> str:
        """Report; gives the reason to end if there is one."""
        if self.ended:  # Ray says so once, and nobody listens after that
            return _ENDED
        from ray import tune

        try:
            if checkpoint is None:
                tune.report(metrics)
                return ""
            with exchange.offer(Path(self._task.folder), self._name, checkpoint, metrics) as offered:
                tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(offered))
        except SystemExit:  # Ray's way to end a trial; the run is to end in its own way, with a checkpoint
            self.ended = True
            return _ENDED
        return ""

    def leave(self) -> None:
        """The run has ended: if that was Ray's wish, go the way that Ray meant, as nobody listens to reports now."""
        if self.ended:
            sys.exit(0)


def tune_checkpoint() -> dict[str, Any] | None:
    """What Ray gives this trial to go on from."""
    from ray import tune

    checkpoint = tune.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as folder:
        return exchange.read(Path(folder))
