"""What a search leaves on disk: `search.json` (what was asked) and `trials.jsonl` (what became of each trial).

Whoever runs the search writes them through `SearchFolder` as it goes on; tables, reports and `best.yaml` are made of
these two files alone, so that a report can be made at any time: while the search runs, after a crash, on another
machine.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from distributed_training.runtime.errors import RunDirectoryError
from distributed_training.runtime.run_directory import read_jsonl

Status = Literal["pending", "running", "paused", "completed", "stopped", "failed"]
"""`stopped`: ended early by the scheduler because others did better. `failed`: after its last retry."""
OVER: tuple[Status, ...] = ("completed", "stopped", "failed")


@dataclass
class Trial:
    """One trial: what it tried and what came of it."""

    id: str
    """Name of the trial, unique in its search."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """What was tried, by dotted config key. A parameter whose condition did not hold is left out."""
    status: Status = "pending"
    """Where it stands."""
    last: dict[str, float] = field(default_factory=dict)
    """The newest metrics."""
    best: dict[str, float] = field(default_factory=dict)
    """All metrics of the report in which the first objective was best: they belong together."""
    history: list[tuple[float, float]] = field(default_factory=list)
    """(epoch, value of the first objective) of every report."""
    seconds: float = 0.0
    """How long it trained, over all its attempts."""
    directory: str = ""
    """Its run directory, relative to the search's folder where it lies inside."""
    error: str = ""
    """Why it failed, or why its last failed attempt did."""
    attempts: int = 1
    """How often it was started; more than 1 where it was tried again after a failure."""
    started: float | None = None
    """When it began, in seconds since 1970."""

    @property
    def over(self) -> bool:
        """Whether nothing more will come of it."""
        return self.status in OVER

    @property
    def epoch(self) -> float | None:
        """Epochs done so far."""
        return self.history[-1][0] if self.history else None

    def value(self, metric: str) -> float | None:
        """The figure that the trial counts with: that of its best report; None where there is no finite one."""
        found = self.best.get(metric, self.last.get(metric))
        return found if found is not None and math.isfinite(found) else None


@dataclass
class Search:
    """One search: what was asked, and how it ended."""

    name: str
    """Name of the search, and of its folder."""
    objectives: dict[str, Literal["min", "max"]] = field(default_factory=lambda: {"val_loss": "min"})
    """What is sought: metric and direction. The first one decides what is best; several span a Pareto front."""
    space: dict[str, Any] = field(default_factory=dict)
    """The space as written in the config: dotted key to {uniform: [low, high]}, {choice: [...]}, ..."""
    algorithm: str = "random"
    """Where the parameters come from."""
    scheduler: str = "none"
    """Who ends hopeless trials."""
    seed: int | None = None
    """Seed of the searcher."""
    samples: int | None = None
    """How many trials are wanted in all; None where only the time ends the search."""
    time_budget: float | None = None
    """Seconds that the search may take."""
    status: str = "running"
    """running, completed, time is up, interrupted or failed."""
    signal: str = ""
    """What interrupted it, if that was not Ctrl-C: SIGTERM or SIGHUP."""
    started: float | None = None
    """When it began, in seconds since 1970."""
    ended: float | None = None
    """When it ended."""
    config: dict[str, Any] = field(default_factory=dict)
    """The settings that all trials share, as a nested dict."""

    @property
    def metric(self) -> str:
        """The objective that decides what is best."""
        return next(iter(self.objectives))

    @property
    def mode(self) -> Literal["min", "max"]:
        """Whether small or large values of it are good."""
        return self.objectives[self.metric]


@dataclass(frozen=True)
class SearchFolder:
    """The paths inside a search's folder, and what is written there."""

    path: Path

    @property
    def search_file(self) -> Path:
        """What was asked."""
        return self.path / "search.json"

    @property
    def trials_file(self) -> Path:
        """One line for each change of a trial; the last one of a trial counts."""
        return self.path / "trials.jsonl"

    @property
    def best_file(self) -> Path:
        """The config of the best trial, for `dtrain train`."""
        return self.path / "best.yaml"

    @property
    def report(self) -> Path:
        """Folder of the plots and the HTML page."""
        return self.path / "report"

    def save(self, search: Search) -> None:
        """Write what was asked and how it stands: whole or not at all."""
        self._replace(self.search_file, json.dumps(_plain(asdict(search)), indent=2) + "\n")

    def append(self, *trials: Trial) -> None:
        """Note how these trials stand now."""
        text = "".join(json.dumps(_plain(asdict(trial))) + "\n" for trial in trials)
        try:
            with self.trials_file.open("a+b") as file:
                if file.tell() and file.seek(-1, os.SEEK_END) and file.read(1) != b"\n":
                    text = "\n" + text  # the last line was cut off by a crash
                file.write(text.encode())
        except OSError as error:
            raise RunDirectoryError(f"{self.trials_file}: cannot be written ({error.strerror})") from None

    def write_trials(self, trials: Iterable[Trial]) -> None:
        """Write all trials anew, one line each, in place of the lines so far."""
        self._replace(self.trials_file, "".join(json.dumps(_plain(asdict(trial))) + "\n" for trial in trials))

    def load(self) -> Search:
        """What was asked."""
        try:
            values = json.loads(self.search_file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise RunDirectoryError(
                f"{self.path}: not the folder of a search (no {self.search_file.name}); give one made by dtrain tune"
            ) from None
        except (OSError, ValueError) as error:
            raise RunDirectoryError(f"{self.search_file}: cannot be read: {error}") from None
        if not isinstance(values, dict) or not isinstance(values.get("name"), str) or not values.get("objectives"):
            raise RunDirectoryError(f"{self.search_file}: not written by dtrain tune (no name or no objectives)")
        return Search(**_known(Search, values))

    def trials(self) -> list[Trial]:
        """All trials as they stand, in the order in which they came."""
        found: dict[str, Trial] = {}
        for line in read_jsonl(self.trials_file):
            if isinstance(line, dict) and isinstance(line.get("id"), str):
                found[line["id"]] = _trial(line)
        return list(found.values())

    def _replace(self, file: Path, text: str) -> None:
        part = file.with_name(file.name + ".part")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with part.open("w", encoding="utf-8") as out:
                out.write(text)
                out.flush()
                os.fsync(out.fileno())
            os.replace(part, file)
        except OSError as error:
            raise RunDirectoryError(f"{file}: cannot be written ({error.strerror})") from None


def _trial(values: Mapping[str, Any]) -> Trial:
    trial = Trial(**_known(Trial, values))
    trial.history = [(float(epoch), _number(value)) for epoch, value in trial.history]
    trial.last, trial.best = ({k: _number(v) for k, v in metrics.items()} for metrics in (trial.last, trial.best))
    return trial


def _known(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that this version knows: a newer one may write more."""
    return {f.name: values[f.name] for f in fields(kind) if f.name in values}


def _number(value: Any) -> float:
    """JSON's null stands for a value that was not finite."""
    return float(value) if isinstance(value, (int, float)) else math.nan


def _plain(value: Any) -> Any:
    """What JSON can hold: numbers of NumPy and torch as Python's, paths as text, null for what is not finite."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    item = getattr(value, "item", None)  # scalars of NumPy and torch
    return _plain(item()) if callable(item) else str(value)
