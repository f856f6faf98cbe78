"""What the driver of a search sees of its trials, written down as they go on."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ray.tune import Callback, Stopper
from ray.tune.logger import JsonLoggerCallback

from distributed_training.tuning.live import LiveTable
from distributed_training.tuning.records import Search, SearchFolder, Status, Trial
from distributed_training.tuning.reporting import DIRECTORY, DONE, EPOCH, SECONDS, missing, numbers
from distributed_training.tuning.standings import better

_EVERY = 1.0  # seconds between two lines about a trial that goes on
_watches: dict[str, Watch] = {}


@dataclass
class Watch:
    """The records of one search, kept up to date. Called in the driver's thread."""

    folder: SearchFolder
    search: Search
    last_epoch: int | None = None
    """Epochs of a trial that nobody ends, if they are known; tells `completed` from `stopped`."""
    table: LiveTable | None = None
    trials: dict[str, Trial] = field(default_factory=dict)
    problem: str = ""
    """Why the search makes no sense, once that is known."""
    _written: dict[str, float] = field(default_factory=dict)

    def __enter__(self) -> Watch:
        self.trials = {trial.id: trial for trial in self.folder.trials()}
        _watches[str(self.folder.path)] = self
        return self

    def __exit__(self, *exc: object) -> None:
        del _watches[str(self.folder.path)]
        if self.table is not None:
            self.table.close()

    def callback(self) -> WatchCallback:
        """What Ray is given."""
        return WatchCallback(str(self.folder.path))

    def started(self, trial: Any) -> None:
        """A trial begins, or goes on."""
        record = self._record(trial)
        self._note_parameters(record, trial)
        record.started = record.started or time.time()
        record.status = "running"
        self._write(record)

    def reported(self, trial: Any, result: Mapping[str, Any]) -> None:
        """A trial says how it stands."""
        if self.problem:
            return
        record, metrics = self._record(trial), numbers(result)
        self._note_parameters(record, trial)
        record.last, value = metrics, metrics[self.search.metric]
        epoch = float(result.get(EPOCH, result.get("training_iteration", len(record.history) + 1)))
        record.history = [pair for pair in record.history if pair[0] < epoch] + [(epoch, value)]
        if self.search.metric not in record.best or better(value, record.best[self.search.metric], self.search.mode):
            record.best = metrics
        record.seconds = float(result.get(SECONDS, result.get("time_total_s", record.seconds)))
        record.directory = self._relative(result.get(DIRECTORY, record.directory))
        record.status = "stopped" if result.get(DONE) else "running"
        self._write(record, soon=time.monotonic() - self._written.get(record.id, 0.0) > _EVERY)

    def ended(self, trial: Any) -> None:
        """A trial came to its end, or was brought there."""
        record = self._record(trial)
        last = record.parameters.get("training.epochs", self.last_epoch) if self.last_epoch is not None else None
        whole = record.status != "stopped" if last is None else (record.epoch or 0) >= last
        record.status = "completed" if whole else "stopped"
        self._write(record)

    def failed(self, trial: Any, *, for_good: bool) -> None:
        """An attempt at a trial failed."""
        record = self._record(trial)
        record.error, record.attempts = error_of(trial), int(trial.num_failures) + (0 if for_good else 1)
        record.status = "failed" if for_good else "pending"
        self._write(record)

    def left(self, status: Status) -> None:
        """The search has ended: what becomes of trials that had not."""
        for record in self.trials.values():
            if not record.over:
                record.status = status
                self._write(record)

    def seen(self, trials: list[Any]) -> None:
        """Called after every step of Ray's."""
        for trial in trials:
            record = self.trials.get(str(trial))
            if record is not None and trial.status == "PAUSED" and record.status == "running":
                record.status = "paused"
        if self.table is not None:
            self.table.update(list(self.trials.values()))

    def _record(self, trial: Any) -> Trial:
        return self.trials.setdefault(str(trial), Trial(str(trial)))

    @staticmethod
    def _note_parameters(record: Trial, trial: Any) -> None:
        """What it tries now. In a population that changes, and the best report has to belong to what is noted."""
        if record.parameters and record.parameters != dict(trial.config):
            record.best = {}
        record.parameters = dict(trial.config)

    def _relative(self, directory: str) -> str:
        path = Path(directory)
        return str(path.relative_to(self.folder.path)) if path.is_relative_to(self.folder.path) else directory

    def _write(self, record: Trial, soon: bool = True) -> None:
        if soon:
            self._written[record.id] = time.monotonic()
            self.folder.append(record)


class WatchCallback(Callback):
    """Ray's way to the watch. Ray writes its callbacks to disk and makes them anew: this one holds only a name."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    @property
    def _watch(self) -> Watch:
        return _watches[self._folder]

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._watch.started(trial)

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        self._watch.reported(trial, result)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._watch.ended(trial)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._watch.failed(trial, for_good=True)

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._watch.failed(trial, for_good=False)

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        self._watch.seen(trials)


class NeedsObjectives(Stopper):
    """Ends a search at the first report that lacks what is sought. Ray asks it before anybody else."""

    def __init__(self, folder: str, objectives: Mapping[str, str]) -> None:
        self._folder, self._objectives = folder, dict(objectives)

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        gone, told = missing(self._objectives, result), ", ".join(numbers(result))
        if not gone:
            return False
        if told:
            problem = (
                f"{', '.join(gone)}: never reported, but the search is for it; reported were {told}: name one of them "
                "in tuning.objectives (in Python: metric=..., mode=...)"
            )
        else:
            problem = (
                f"a trial ended and had reported nothing, but the search is for {', '.join(gone)}: report it with "
                "report({...}), or return it from the function"
            )
        _watches[self._folder].problem = problem
        return True

    def stop_all(self) -> bool:
        """Whether something was missing. Time budgets are Ray's own."""
        watch = _watches.get(self._folder)
        return watch is not None and bool(watch.problem)


class ResultFiles(JsonLoggerCallback):
    """Ray's own files of each trial's reports, which its results are read from; all are closed in the end."""

    def on_experiment_end(self, trials: list[Any], **info: Any) -> None:
        for trial in trials:
            self.log_trial_end(trial)


def error_of(trial: Any) -> str:
    """Why an attempt failed, in a line: what the trial raised, without the way there."""
    file = trial.error_file  # on this machine; in the search's folder it comes later
    text = Path(file).read_text(encoding="utf-8", errors="replace") if file and Path(file).is_file() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return re.sub(r"^(\w+\.)+(?=\w+: )", "", lines[-1]) if lines else "unknown error"
