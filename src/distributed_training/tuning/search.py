"""A search from its first trial to its last, or from where an earlier attempt was interrupted."""

from __future__ import annotations

import functools
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from distributed_training.config import Config, ConfigError, TuningConfig
from distributed_training.config.tuning import budget_seconds
from distributed_training.launch.ray_address import through_client
from distributed_training.launch.ray_cluster import connected
from distributed_training.runtime.environment import environment_for_a_while
from distributed_training.runtime.errors import RunDirectoryError, SearchError
from distributed_training.runtime.imports import require
from distributed_training.tuning.records import Search, SearchFolder
from distributed_training.tuning.space import Space

logger = logging.getLogger(__name__)

SETTINGS = "search.yaml"
"""The whole config of a search, in its folder."""
_VARIABLES = {
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # ours says which metrics there are
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "5",  # what is lost of a search whose driver is killed
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "TUNE_RESULT_BUFFER_LENGTH": "1",
    "RAY_AIR_NEW_OUTPUT": "0",  # its tables: there is one of ours
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",  # they are in the table and in the records
}


@dataclass(frozen=True)
class Plan:
    """What is searched, checked and ready to start."""

    tuning: TuningConfig
    """How it is searched."""
    space: Mapping[str, Any]
    """As it was written."""
    objectives: Mapping[str, str]
    """What is sought."""
    root: Path
    """Folder of all runs."""
    name: str | None = None
    """Of the search, and of its folder."""
    config: Config | None = None
    """Settings of every trial."""
    function: Callable[[Any], Any] | None = None
    """The user's own training."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """What that function gets beside the parameters."""
    progress: str = "auto"
    """As `run.progress`."""
    settings: Config | None = None
    """The whole config, with the section of the search: kept in the search's folder, to go on with."""

    @functools.cached_property
    def read_space(self) -> Space:
        """The space, checked against the config."""
        base = self.config if self.config is not None else self.constants
        return Space.read(self.space, base)

    @property
    def epochs(self) -> int | None:
        """How far a trial goes that nobody ends, if that is known."""
        if self.config is None or self.function is not None:
            return None
        domain = self.read_space.domains.get("training.epochs")
        return max(domain.extremes()) if domain is not None else self.config.training.epochs


def plan_of(config: Config) -> Plan:
    """The search that a config describes."""
    tuning = config.tuning
    objectives = tuning.objectives or {config.checkpoint.monitor: config.checkpoint.mode}
    trials = config.replace(
        **{"tuning.space": {}, "tuning.objectives": {}, "run.name": None, **_judged_by(config, objectives)}
    )
    where = {"root": Path(config.run.root), "name": config.run.name, "progress": config.run.progress}
    return Plan(tuning, tuning.space, objectives, config=trials, settings=config, **where)  # type: ignore[arg-type]


def _judged_by(config: Config, objectives: Mapping[str, str]) -> dict[str, Any]:
    """A trial keeps the checkpoint that is best by what the search is for, if that is a metric of validation."""
    metric, mode = next(iter(objectives.items()))
    return {"checkpoint.monitor": metric, "checkpoint.mode": mode} if metric.startswith("val_") else {}


def run(plan: Plan) -> tuple[Any, SearchFolder]:
    """Search. Gives Ray's ResultGrid, and the folder with all that came of it."""
    return _search(plan, None)


def resume(plan: Plan, folder: Path) -> tuple[Any, SearchFolder]:
    """Go on with a search that was interrupted. `plan` has to be what it began with."""
    place = SearchFolder(folder.absolute())
    before, now = place.load(), _described(plan, folder.name, 0)
    for name in ("space", "objectives", "algorithm", "scheduler", "seed"):
        if getattr(before, name) != json.loads(json.dumps(getattr(now, name))):
            raise ConfigError(
                f"{folder}: this search began with tuning.{name}={getattr(before, name)}, and not with "
                f"{getattr(now, name)}: resume it with the settings that it began with, or start a new one"
            )
    changed = _differences(before.config, json.loads(json.dumps(now.config)))
    if changed:
        raise ConfigError(
            f"{folder}: its trials began with other settings: {'; '.join(changed[:5])}; start a new search"
        )
    return _search(plan, place)


def _search(plan: Plan, earlier: SearchFolder | None) -> tuple[Any, SearchFolder]:
    require("ray", "ray", "a search for hyper-parameters")
    require("ray.tune", "ray", "a search for hyper-parameters")
    plan.read_space  # noqa: B018 (refuses a space that makes no sense, before anything starts)
    if client := through_client(plan.tuning.address):
        raise ConfigError(
            f"tuning.address={client}: a search runs on a machine of the cluster, as its trials write below run.root; "
            "start it there, with address auto, or send it there with `ray job submit -- dtrain tune ...`"
        )
    from distributed_training.tuning.resources import check_one_fits, resources_of

    with environment_for_a_while(**_variables()), connected(plan.tuning.address) as ray:
        device = plan.config.training.device if plan.config is not None else "auto"
        resources = resources_of(ray, plan.tuning, device)
        check_one_fits(ray, resources)
        from distributed_training.tuning.engine import Engine

        folder = earlier or _new_folder(plan)
        engine = Engine(plan, folder, resources)
        search = _described(plan, folder.path.name, engine.samples)
        if earlier is not None:
            search.started = earlier.load().started
        with _recorded(folder, search), _feed(plan, ray) as feed:
            results = engine.run(search, go_on=earlier is not None, feed=feed)
            search.status = _status(plan, engine, search)
        return results, folder


def _variables() -> dict[str, str]:
    """Settings of Ray Tune that it takes only from the environment; a user's own stay."""
    return {name: value for name, value in _VARIABLES.items() if name not in os.environ}


def _new_folder(plan: Plan) -> SearchFolder:
    name = plan.name or f"tune-{datetime.now():%Y%m%d-%H%M%S}"
    path = (plan.root / name).absolute()
    tries = (path.with_name(f"{name}-{n}") for n in range(2, 1000))
    while plan.name is None and path.exists():
        path = next(tries)
    folder = SearchFolder(path)
    if folder.search_file.exists() or (path / "config.yaml").exists():
        raise RunDirectoryError(
            f"{path}: a search or run of this name exists; go on with --resume {path}, or choose another run.name"
        )
    try:
        (path / "trials").mkdir(parents=True, exist_ok=True)
        if plan.settings is not None and plan.function is None:
            plan.settings.save(path / SETTINGS)
    except OSError as error:
        raise RunDirectoryError(
            f"{path}: cannot be made ({error.strerror}); choose another folder with run.root"
        ) from None
    return folder


def _described(plan: Plan, name: str, samples: int) -> Search:
    return Search(
        name=name,
        objectives=dict(plan.objectives),  # type: ignore[arg-type]
        space=_written(plan.read_space.described()),
        algorithm=plan.tuning.algorithm,
        scheduler=plan.tuning.scheduler,
        seed=plan.tuning.seed,
        samples=samples,
        time_budget=budget_seconds(plan.tuning.time_budget),
        started=time.time(),
        config=plan.config.to_dict() if plan.config is not None else _written(plan.constants),
    )


def _written(values: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping as JSON can keep it: what is not plain becomes text."""
    written: dict[str, Any] = json.loads(json.dumps(dict(values), default=str))
    return written


@contextmanager
def _recorded(folder: SearchFolder, search: Search) -> Iterator[None]:
    """The search's file says that it runs, and in the end how it ended."""
    search.status = "running"
    folder.save(search)
    try:
        yield
    except BaseException as error:
        search.status = "failed" if isinstance(error, Exception) else "interrupted"
        raise
    finally:
        search.ended = time.time()
        folder.save(search)


@contextmanager
def _feed(plan: Plan, ray: Any) -> Iterator[str | None]:
    """The feed that all trials share, where they are ordinary runs and something is gained by it."""
    if plan.config is None or plan.function is not None:
        yield None
        return
    from distributed_training.tuning.shared_feed import SharedFeed

    with SharedFeed(plan.config, ray) as feed:
        yield feed.name


def _status(plan: Plan, engine: Any, search: Search) -> str:
    trials = list(engine.watch.trials.values())
    over = [trial for trial in trials if trial.over]
    budget = search.time_budget
    if trials and len(over) == len(trials) and all(trial.status == "failed" for trial in trials):
        first = min(trials, key=lambda trial: trial.id)
        raise SearchError(
            f"all {len(trials)} trials failed; the first ({first.id}, {_shown(first.parameters)}) with: {first.error}. "
            f"What each said is in {engine.folder.trials_file}"
        )
    if budget is not None and time.time() - engine.began >= budget:
        engine.watch.left("stopped")
        return "time is up"
    engine.watch.left("paused")
    return "completed" if len(over) >= engine.samples else "interrupted"


def _shown(parameters: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in parameters.items()
    )


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Settings of trials that are others than before. Those of the search itself may be."""
    changed: list[str] = []
    for key in {**before, **now}:
        if prefix == "" and key in ("tuning", "run"):
            continue
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            changed += _differences(old, new, f"{prefix}{key}.")
        elif old != new:
            changed.append(f"{prefix}{key} was {old} and is {new}")
    return changed
