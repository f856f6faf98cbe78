"""The model of a job, left where SageMaker looks for it: a run's folder with its best checkpoint and plain weights.

Brought back, it is a run like any other: `dtrain validate`, `predict`, `report` and `--resume` work on it.
`model.safetensors` holds the weights alone, by their names in the model.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

from distributed_training.checkpoint import CheckpointInfo, CheckpointStore, read_state, verify
from distributed_training.runtime.errors import CheckpointError, DistributedTrainingError
from distributed_training.runtime.run_directory import RunDirectory

logger = logging.getLogger(__name__)
WEIGHTS = "model.safetensors"


def export(runs: Path, model: Path) -> Path | None:
    """Copy the run that was worked on last; its folder, or None if there is none with a checkpoint."""
    found = [RunDirectory(file.parent) for file in runs.glob("*/config.yaml")]
    if not found:
        return None
    run = max(found, key=_last_written)
    chosen = _best(run)
    if chosen is None:
        return None
    model.mkdir(parents=True, exist_ok=True)
    for path in (run.config_file, run.events_file, run.ledger_file, run.identity_file):
        if path.is_file():
            shutil.copy2(path, model / path.name)
    if run.report.is_dir():
        shutil.copytree(run.report, model / run.report.name, dirs_exist_ok=True)
    shutil.copytree(chosen.path, RunDirectory(model).checkpoints / chosen.path.name, dirs_exist_ok=True)
    _write_weights(read_state(chosen.path)["model"], model / WEIGHTS)
    return run.path


def _last_written(run: RunDirectory) -> int:
    times = [path.stat().st_mtime_ns for path in (run.config_file, run.events_file) if path.is_file()]
    return max(times)


def _best(run: RunDirectory) -> CheckpointInfo | None:
    try:
        store = CheckpointStore(run.checkpoints, run.load_config().checkpoint)
    except DistributedTrainingError as error:
        logger.warning("%s: %s", run.path, error)
        return None
    best = store.best()
    if best is not None:
        try:
            verify(best.path)
            return best
        except CheckpointError as error:
            logger.warning("the best checkpoint is passed over: %s", error)
    return store.newest_good()


def _write_weights(weights: Any, path: Path) -> None:
    """Tied weights are written under each of their names: the format has no links."""
    from safetensors.torch import save_file

    save_file({name: value.detach().clone().contiguous() for name, value in weights.items()}, path)
