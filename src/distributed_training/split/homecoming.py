"""Checkpoints come home, put together: on the GPU side around a training, on the CPU side the folder of a loader."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from distributed_training.checkpoint.files import (
    MANIFEST_FILE,
    STATE_FILE,
    CheckpointInfo,
    adopt,
    checkpoint_name,
    read_plain,
    read_shapes,
)
from distributed_training.checkpoint.store import CheckpointStore
from distributed_training.config import Config
from distributed_training.data import Loader as LocalLoader
from distributed_training.feed.homecoming.fetching import Brought, Fetching
from distributed_training.feed.homecoming.home import Home, identity_of
from distributed_training.feed.homecoming.names import EVENTS, GROWING
from distributed_training.feed.settings import MEBI
from distributed_training.runtime.errors import CheckpointError
from distributed_training.runtime.run_directory import RunDirectory, create_run_directory, newest_run
from distributed_training.training import Callback, Trainer
from distributed_training.training.resume import changed_settings

if TYPE_CHECKING:
    from distributed_training.data.base import BatchSource
    from distributed_training.feed import FeedServer

logger = logging.getLogger(__name__)

_HARMLESS = ("epochs", "device", "log_every", "compile", "gradient_accumulation", "gradient_checkpointing")
"""Settings of `training` that may differ on a new GPU side: the training stays the same, or goes on longer."""
_MODEL = "model/"


class Homecoming:
    """What the GPU side does for a loader that keeps a copy of the run. Nothing, where none does."""

    def __init__(self, trainer: Trainer, server: FeedServer, source: BatchSource) -> None:
        self._trainer, self._courier, self._source = trainer, server.courier, source
        self._leads = trainer.strategy.rank == 0 and trainer.run_dir is not False
        self._run_dir = trainer.run_dir
        self._departure = _Departure(server)

    def begin(self, resume: str | Path | None) -> str | Path | None:
        """What to resume from: as said, or from the checkpoint that a loader brings, if that goes further."""
        if not self._leads:
            return resume
        self._trainer.callbacks.append(self._departure)
        wanted = str(resume or self._trainer.config.checkpoint.resume)
        if wanted not in ("never", "auto"):
            return resume  # a certain one was asked for
        fetching = Fetching(self._courier)
        brought = fetching.brought()
        if brought is None:
            return resume
        run, start = self._own(wanted)
        if run is not None and start is not None and (identity_of(run) != brought.run or start.step >= brought.step):
            fetching.decline(brought, "")
            return resume
        return self._take(fetching, brought, run if start is not None else None) or resume

    def finish(self) -> None:
        """Training has ended: see to it that its last checkpoint and its metrics are at home."""
        if self._leads and not self._courier.finish():
            logger.warning(
                "the last files of this run did not reach the loader that keeps a copy; they are in the run's folder"
            )

    def close(self) -> None:
        """Leave the trainer as it was."""
        self._trainer.run_dir = self._run_dir
        if self._departure in self._trainer.callbacks:
            self._trainer.callbacks.remove(self._departure)

    # -- a checkpoint that a loader brings

    def _own(self, wanted: str) -> tuple[RunDirectory | None, CheckpointInfo | None]:
        """The run that would be resumed without a loader's help, and its newest checkpoint."""
        if wanted == "never":
            return None, None
        given, config = self._trainer.run_dir, self._trainer.recorded_config(self._source)
        run = RunDirectory(Path(given)) if isinstance(given, (str, Path)) else newest_run(config)
        if run is None or not run.config_file.exists():
            return None, None
        return run, CheckpointStore(run.checkpoints, config.checkpoint).newest_good()

    def _take(self, fetching: Fetching, brought: Brought, run: RunDirectory | None) -> str | None:
        """Have the checkpoint come into `run`, or a new folder; its path. None where it is of another training."""
        root = Path(self._trainer.config.run.root)
        root.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=".arriving-", dir=root))
        try:
            checkpoint, arriving = aside / checkpoint_name(brought.step), aside / "parts"
            checkpoint.mkdir()
            fetching.fetch(brought, brought.path(MANIFEST_FILE), arriving).rename(checkpoint / MANIFEST_FILE)
            if differences := self._differences(checkpoint):
                self._leave(fetching, brought, differences)
                return None
            _say(f"taking step {brought.step} of an unfinished training from {brought.loader}")
            fetching.fetch(brought, brought.path(STATE_FILE), arriving).rename(checkpoint / STATE_FILE)
            if differences := self._other_shapes(checkpoint):
                self._leave(fetching, brought, differences)
                return None
            files = {path: fetching.fetch(brought, path, arriving) for path in GROWING if fetching.has(brought, path)}
            fetching.decline(brought, "")
            return self._place(brought, checkpoint, files, run)
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _place(self, brought: Brought, checkpoint: Path, files: dict[str, Path], run: RunDirectory | None) -> str:
        trainer = self._trainer
        if run is None:
            given = Path(trainer.run_dir) if isinstance(trainer.run_dir, (str, Path)) else None
            config, kind = trainer.recorded_config(self._source), type(trainer.model).__name__
            run = create_run_directory(config, given, kind)
        run = RunDirectory(run.path.absolute())
        run.identity_file.write_text(brought.run, encoding="ascii")
        for path, file in files.items():
            own = run.path / path
            if not own.exists() or own.stat().st_size < file.stat().st_size:
                file.replace(own)
        adopt(checkpoint, run.checkpoints / checkpoint.name)
        trainer.run_dir = run.path
        _say(
            f"going on from step {brought.step}, in {run.path}; to begin anew instead, give the loader another "
            "run.name or feed.checkpoints_home=off"
        )
        return str(run.path)

    def _differences(self, checkpoint: Path) -> list[str]:
        """In what the training of a checkpoint was another one than this."""
        try:
            then, source = read_plain(checkpoint, "config"), read_plain(checkpoint, "source")
            now = self._trainer.recorded_config(self._source).to_dict()
            for config in (then, now):
                config["training"] = {k: v for k, v in config["training"].items() if k not in _HARMLESS}
            changed = changed_settings(then, now)
            here = self._source.describe()
            return changed + [f"{k} was {v} and is {here.get(k)}" for k, v in source.items() if v != here.get(k)]
        except (CheckpointError, AttributeError, KeyError, TypeError) as error:
            return [f"its manifest cannot be used ({error})"]

    def _other_shapes(self, checkpoint: Path) -> list[str]:
        there = {name.removeprefix(_MODEL): shape for name, shape in read_shapes(checkpoint).items()}
        here = {name: tuple(tensor.shape) for name, tensor in self._trainer.model.state_dict().items()}
        return [
            f"{name} was {list(there[name])} and is {list(here[name])}"
            for name in here.keys() & there.keys()
            if there[name] != here[name]
        ]

    def _leave(self, fetching: Fetching, brought: Brought, differences: list[str]) -> None:
        logger.warning(
            "%s brings step %d of another training: %s; this one begins anew, and gets a folder of its own there",
            brought.loader,
            brought.step,
            "; ".join(differences)[:1000],
        )
        fetching.decline(brought, "it is of another training: " + "; ".join(differences)[:500])


class _Departure(Callback):
    """Tells the courier where the run's folder is, once there is one."""

    def __init__(self, server: FeedServer) -> None:
        self._courier = server.courier

    def on_train_start(self, trainer: Trainer) -> None:
        run = trainer.run_directory
        if run is not None and self._courier.choice != "off":
            identity = identity_of(run)
            if identity is None:
                identity = secrets.token_hex(16)
                run.identity_file.write_text(identity, encoding="ascii")
            self._courier.begin(run, identity, trainer.config.checkpoint)


def home_for(config: Config, train: LocalLoader) -> Home | None:
    """Where a loader keeps copies of the runs that it feeds; None where it is told not to.

    The folder's name follows from what is loaded, or from `run.name`: so the same command finds it again.
    """
    feed = config.feed
    if feed.checkpoints_home == "off":
        return None
    what = json.dumps([train.dataset.fingerprint(), train.plan.describe()], sort_keys=True, default=str)
    name = f"{config.run.name}-home" if config.run.name else f"home-{hashlib.sha256(what.encode()).hexdigest()[:8]}"
    limit = feed.max_checkpoint_mb * MEBI
    return Home(Path(config.run.root), name, config.checkpoint, limit=limit, always=feed.checkpoints_home == "on")


def say_where(home: Home, began: float) -> None:
    """The last line of a loader that kept a copy of the run, if anything came: where it lies."""
    run = home.newest()
    if run is None or not run.home_file.exists() or run.home_file.stat().st_mtime < began - 1:
        return
    checkpoints = CheckpointStore(run.checkpoints, Config().checkpoint).all()
    step = f"weights of step {checkpoints[-1].step} in {checkpoints[-1].path}, " if checkpoints else ""
    _say(f"at home: {step}metrics in {run.path / EVENTS}")


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
