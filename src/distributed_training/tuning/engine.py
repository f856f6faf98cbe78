"""Ray's Tuner, made of a plan, and run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from ray import tune

from distributed_training.config import ConfigError
from distributed_training.config.tuning import budget_seconds
from distributed_training.runtime.errors import DistributedTrainingError, SearchError
from distributed_training.tuning.ending import EndsInPeace
from distributed_training.tuning.interruption import ends_like_ctrl_c
from distributed_training.tuning.live import LiveTable
from distributed_training.tuning.records import Search, SearchFolder
from distributed_training.tuning.reporting import EPOCH
from distributed_training.tuning.resources import Resources
from distributed_training.tuning.schedulers import Length, make_scheduler
from distributed_training.tuning.search import Plan
from distributed_training.tuning.searchers import make_searcher
from distributed_training.tuning.trial import Task, run_trial
from distributed_training.tuning.watch import NeedsObjectives, ResultFiles, Watch

_RAY = "ray"  # folder of Ray's own files inside that of a search
_REPORTS = 10_000  # more than a function of the user's own makes


class Engine:
    """Runs the trials of one search."""

    def __init__(self, plan: Plan, folder: SearchFolder, resources: Resources) -> None:
        self.plan, self.folder, self._resources = plan, folder, resources
        suggestions = make_searcher(plan.tuning, plan.read_space, plan.objectives)
        self.samples, self._suggestions = suggestions.trials, suggestions
        self.began = time.time()
        self._feed: str | None = None
        self.watch: Watch

    def run(self, search: Search, go_on: bool, feed: str | None = None) -> Any:
        """All trials, or those that are left, with the feed of this name. Gives Ray's ResultGrid."""
        self._feed = feed
        table = LiveTable(search, self.plan.progress, self.plan.epochs)
        self.watch = Watch(self.folder, search, self.plan.epochs, table)
        with self.watch:
            tuner = self._restored() if go_on else self._new()
            try:
                with ends_like_ctrl_c(search):
                    results = tuner.fit()
            except Exception as error:
                raise _ours(error) from error
            if self.watch.problem:
                raise ConfigError(self.watch.problem)
            return results

    def _new(self) -> tune.Tuner:
        tuning, plan = self.plan.tuning, self.plan
        metric, mode = next(iter(plan.objectives.items()))
        return tune.Tuner(
            self._trainable(),
            param_space=self._suggestions.param_space,
            tune_config=tune.TuneConfig(
                metric=metric,
                mode=mode,
                search_alg=self._suggestions.searcher,
                scheduler=make_scheduler(tuning, plan.read_space, self._length),
                num_samples=self.samples,
                max_concurrent_trials=tuning.max_concurrent,
                time_budget_s=budget_seconds(tuning.time_budget),
                reuse_actors=True,
                trial_name_creator=name_of,
                trial_dirname_creator=name_of,
            ),
            run_config=tune.RunConfig(
                name=_RAY,
                storage_path=str(self.folder.path),
                failure_config=tune.FailureConfig(max_failures=tuning.retries),
                checkpoint_config=tune.CheckpointConfig(num_to_keep=4),
                stop=NeedsObjectives(str(self.folder.path), plan.objectives),
                callbacks=[self.watch.callback(), ResultFiles()],
                verbose=0,
            ),
        )

    def _restored(self) -> tune.Tuner:
        path = self.folder.path / _RAY
        if not tune.Tuner.can_restore(str(path)):
            return self._new()  # interrupted before its first trial
        return tune.Tuner.restore(str(path), self._trainable(), resume_unfinished=True, resume_errored=False)

    def _trainable(self) -> Any:
        plan = self.plan
        task = Task(
            folder=str(self.folder.path),
            directory=str(Path.cwd()),
            config=plan.config,
            function=plan.function,
            constants=plan.constants,
            exchange_every=plan.tuning.perturb_epochs if plan.tuning.scheduler == "pbt" else None,
            workers=self._resources.workers,
            resources=self._resources.bundle,
            feed=self._feed,
        )

        def trial(config: dict[str, Any]) -> Any:
            return run_trial(config, task)

        trial.__mixins__ = (EndsInPeace,)  # type: ignore[attr-defined]
        return tune.with_resources(trial, self._resources.for_ray())

    @property
    def _length(self) -> Length:
        epochs = self.plan.epochs
        if epochs is None:
            return Length("training_iteration", _REPORTS, settings=False)
        return Length(EPOCH, epochs, settings=True)


def name_of(trial: Any) -> str:
    """A trial's name: its number in the search."""
    return f"{int(str(trial.experiment_tag).partition('_')[0]):04}"


def _ours(error: BaseException) -> DistributedTrainingError:
    """What stopped a search, out of what Ray wraps around it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, DistributedTrainingError):
            return cause
        cause = cause.__cause__ or cause.__context__
    lines = [line for line in str(error).splitlines() if line.strip()]
    return SearchError(f"Ray Tune ended the search: {lines[-1] if lines else type(error).__name__}")
