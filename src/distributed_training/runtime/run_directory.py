"""One folder a run: resolved config, JSONL events, ledger, checkpoints, report. Every tool reads only this."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from distributed_training.config import Config
from distributed_training.runtime.errors import DistributedTrainingError, RunDirectoryError

logger = logging.getLogger(__name__)


FROM_PYTHON = "(given in Python)"
"""`data.dataset` of a run whose data was handed to a Trainer: only the program that made it can make it again."""


@dataclass(frozen=True)
class RunDirectory:
    """The paths inside a run's folder."""

    path: Path

    @property
    def config_file(self) -> Path:
        """All settings in force, as YAML."""
        return self.path / "config.yaml"

    @property
    def events_file(self) -> Path:
        """One JSON object a line: start, metrics, checkpoint, finish."""
        return self.path / "events.jsonl"

    @property
    def ledger_file(self) -> Path:
        """One line a step: which samples it used, as a hash."""
        return self.path / "ledger.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def job_file(self) -> Path:
        """Which job of a launcher makes this run: started again, it goes on here."""
        return self.path / "job"

    @property
    def identity_file(self) -> Path:
        """Names the run, whatever its folder is called: all copies of it have the same one."""
        return self.path / "id"

    @property
    def home_file(self) -> Path:
        """There where the folder is the copy that a loader keeps of a run on a GPU side; who writes it holds a lock."""
        return self.path / ".home"

    @property
    def report(self) -> Path:
        """Folder of the plots and the HTML page."""
        return self.path / "report"

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.path.name

    def load_config(self) -> Config:
        """The settings the run was started with."""
        if not self.config_file.is_file():
            raise RunDirectoryError(
                f"{self.path}: not a run directory (no config.yaml); give a folder made by dtrain train"
            )
        return Config.from_dict(_yaml(self.config_file), source=str(self.config_file))

    def events(self) -> Iterator[dict[str, Any]]:
        """All events so far. A last line cut off by a crash is left out."""
        yield from read_jsonl(self.events_file)


def _yaml(path: Path) -> dict[str, Any]:
    from distributed_training.config.load import read_yaml

    return read_yaml(path)


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file; lines that a crash cut off are skipped."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue


def create_run_directory(
    config: Config, given: Path | None = None, model: str = "", beside: RunDirectory | None = None
) -> RunDirectory:
    """Make the folder for a new run and put its config there. An existing run is never overwritten.

    The new run has the folder `given`, or the name in the config, or one made of model and time. With `beside`, a name
    taken over from that run gets a number.
    """
    root = Path(config.run.root)
    name = config.run.name or f"{(model or config.model.name).lower()}-{datetime.now():%Y%m%d-%H%M%S}"
    path = given or root / name
    inherited = beside is not None and path.resolve() == beside.path.resolve()
    if given is None and (config.run.name is None or inherited):  # two runs in one second, or a fork
        tries = (root / f"{name}-{n}" for n in range(2, 1000))
        while path.exists():
            path = next(tries)
    if (path / "config.yaml").exists():
        raise RunDirectoryError(
            f"{path}: a run of this name exists; continue it with --resume auto, or choose another run.name"
        )
    run = RunDirectory(path)
    try:
        run.checkpoints.mkdir(parents=True, exist_ok=True)
        config.save(run.config_file)
    except OSError as error:
        raise RunDirectoryError(
            f"{path}: cannot be written ({error.strerror}); choose another folder with run.root=FOLDER"
        ) from None
    return run


def run_of_job(config: Config, given: Path | None, job: str) -> RunDirectory | None:
    """The run that an earlier attempt of the same job began."""
    folders = [given] if given is not None else [file.parent for file in Path(config.run.root).glob("*/job")]
    for run in map(RunDirectory, folders):
        if run.job_file.is_file() and run.config_file.is_file() and run.job_file.read_text(encoding="utf-8") == job:
            return run
    return None


def newest_run(config: Config, any_job: bool = False) -> RunDirectory | None:
    """The run that `resume=auto` goes on with: the one named, or else the newest of the same model and dataset."""
    root = Path(config.run.root)
    if config.run.name:
        named = RunDirectory(root / config.run.name)
        return named if named.config_file.is_file() else None
    files = sorted(root.glob("*/config.yaml"), key=lambda file: file.stat().st_mtime_ns, reverse=True)
    for run in (RunDirectory(file.parent) for file in files):
        if run.home_file.exists():  # the copy of a run elsewhere, which may still go on there
            continue
        try:
            saved = run.load_config()
        except DistributedTrainingError as error:  # of another version, or cut off by a crash: no reason to stop here
            logger.warning("%s: left out of the search for a run to resume: %s", run.path, error)
            continue
        same_job = saved.model == config.model and saved.data.dataset == config.data.dataset
        if saved.data.dataset != FROM_PYTHON if any_job else same_job:
            return run
    return None
