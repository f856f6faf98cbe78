"""`HPORunner`: a search from Python, over runs of a config or over a function of the user's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from distributed_training.bench.plots import direction
from distributed_training.config import Config, ConfigError, TuningConfig
from distributed_training.config.check import did_you_mean
from distributed_training.tuning import search
from distributed_training.tuning.finish import finish
from distributed_training.tuning.records import SearchFolder
from distributed_training.tuning.search import Plan

_RUNS = "dtrain"
_OTHER_NAMES = {"num_samples": "samples", "max_concurrent_trials": "max_concurrent", "time_budget_s": "time_budget"}


class HPORunner:
    """Searches for hyper-parameters on Ray Tune.

        runner = HPORunner(train_fn=your_train_fn, config={})
        analysis = runner.run_bayesian_search(get_default_search_space(), num_samples=50, metric="val_loss")
        best = HPORunner.extract_best_config(analysis)

    Every search has a folder with its trials, a report and the best settings: `runner.folder`.
    """

    def __init__(
        self,
        train_fn: Callable[[Any], Any] | str | None = None,
        config: Config | Mapping[str, Any] | str | Path | None = None,
        *,
        metric: str | None = None,
        mode: str | None = None,
        name: str | None = None,
        root: str | Path | None = None,
    ) -> None:
        """
        Args:
            train_fn: a function that gets the parameters of a trial as a dict, and calls `report({...})` (or Ray's
                `tune.report`), or returns its metrics. Left out, or "dtrain": an ordinary run of `config`.
            config: for a function, values that it gets beside the parameters, or a `Config`, which it then gets with
                the parameters in place; for runs, their settings: a `Config`, a nested dict or a YAML file.
            metric: what is sought; left out, `tuning.objectives` or `checkpoint.monitor`, which is val_loss.
            mode: min or max; left out, min for losses, errors and seconds, else max.
            name: of the search's folder; left out, `run.name`, or one made of the time.
            root: where that folder is; left out, `run.root`.
        """
        if isinstance(train_fn, str) and train_fn != _RUNS:
            raise ConfigError(f"train_fn={train_fn!r} must be a function, or {_RUNS!r} for ordinary runs of the config")
        if train_fn is not None and not isinstance(train_fn, str) and not callable(train_fn):
            raise ConfigError(f"train_fn={train_fn!r} is no function")
        self._function = train_fn if callable(train_fn) else None
        self._constants: Mapping[str, Any] = {}
        self._config = self._read(config)
        self._metric, self._mode = metric, mode
        self._name, self._root = name, root
        self.folder: Path | None = None
        """Folder of the newest search."""

    def run_random_search(self, space: Mapping[str, Any] | None = None, num_samples: int = 20, **settings: Any) -> Any:
        """Search at random. `settings` are those of `tuning` in a config, beside `metric` and `mode`.

        Returns:
            Ray's `ResultGrid`.
        """
        return self._run(space, {"algorithm": "random", "samples": num_samples, **settings})

    def run_grid_search(self, space: Mapping[str, Any] | None = None, **settings: Any) -> Any:
        """Try every combination; of a range without `points` or `step`, `grid_points` values. See run_random_search."""
        return self._run(space, {"algorithm": "grid", **settings})

    def run_bayesian_search(
        self, space: Mapping[str, Any] | None = None, num_samples: int = 20, **settings: Any
    ) -> Any:
        """Search by Optuna's TPE, which looks closer where trials went well. See run_random_search."""
        return self._run(space, {"algorithm": "bayesian", "samples": num_samples, **settings})

    def run_population_based(
        self, space: Mapping[str, Any] | None = None, num_samples: int = 8, perturb_epochs: int = 2, **settings: Any
    ) -> Any:
        """Train a population together: every few epochs bad ones take over weights of good ones and change settings.

        A function of your own has to report checkpoints of Ray's for it. See run_random_search.
        """
        chosen = {"algorithm": "random", "samples": num_samples, "scheduler": "pbt", "perturb_epochs": perturb_epochs}
        return self._run(space, {**chosen, **settings})

    def resume(self, folder: str | Path) -> Any:
        """Go on with a search that was interrupted, with the same function and config. See run_random_search."""
        before = SearchFolder(Path(folder)).load()
        settings = {"algorithm": before.algorithm, "scheduler": before.scheduler, "seed": before.seed}
        if before.algorithm != "grid":
            settings["samples"] = before.samples
        plan = self._plan(before.space, {**settings, "objectives": before.objectives})
        return self._finished(*search.resume(plan, Path(folder)))

    @staticmethod
    def extract_best_config(analysis: Any, metric: str | None = None, mode: str | None = None) -> dict[str, Any]:
        """The parameters of the best trial, by their names in the space.

        A trial counts with its best report. `metric` and `mode` are those of the search if they are left out.
        """
        from distributed_training.tuning.finish import best_result

        return dict(best_result(analysis, metric, mode).config)

    def _run(self, space: Mapping[str, Any] | None, settings: Mapping[str, Any]) -> Any:
        return self._finished(*search.run(self._plan(space, settings)))

    def _finished(self, results: Any, folder: SearchFolder) -> Any:
        self.folder = folder.path
        finish(folder, self._config if self._config is not None else dict(self._constants))
        return results

    def _read(self, config: Config | Mapping[str, Any] | str | Path | None) -> Config | None:
        if isinstance(config, Config):
            return config
        if isinstance(config, (str, Path)):
            return Config.from_file(config)
        if self._function is not None:
            self._constants = dict(config or {})
            return None
        return Config.from_dict(config or {}, source="HPORunner(config=...)")

    def _plan(self, space: Mapping[str, Any] | None, settings: Mapping[str, Any]) -> Plan:
        base = self._config if self._config is not None else Config()
        chosen = {_OTHER_NAMES.get(name, name): value for name, value in settings.items()}
        metric, mode = chosen.pop("metric", self._metric), chosen.pop("mode", self._mode)
        if metric is not None:
            names = [metric] if isinstance(metric, str) else list(metric)
            modes = [mode] * len(names) if mode is None or isinstance(mode, str) else list(mode)
            chosen["objectives"] = {n: m or direction(n) or "max" for n, m in zip(names, modes)}
        if space is not None:
            chosen["space"] = {}
        known = [f.name for f in dataclasses.fields(TuningConfig)]
        for name in chosen:
            if name not in known:
                raise ConfigError(f"{name}: no setting of a search{did_you_mean(name, known)}")
        if chosen.get("time_budget") is not None:
            chosen["time_budget"] = str(chosen["time_budget"])
        changes = {f"tuning.{name}": value for name, value in chosen.items()}
        if self._name is not None:
            changes["run.name"] = self._name
        if self._root is not None:
            changes["run.root"] = str(self._root)
        plan = search.plan_of(base.replace(**changes))
        return dataclasses.replace(
            plan,
            space=space if space is not None else plan.space,
            config=plan.config if self._config is not None else None,
            function=self._function,
            constants=self._constants,
        )
