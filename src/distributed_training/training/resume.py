"""Where a training starts: a new run directory, or an earlier run's newest good checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from distributed_training.checkpoint import CheckpointInfo, CheckpointStore, find_checkpoint
from distributed_training.config import Config
from distributed_training.runtime.errors import CheckpointError
from distributed_training.runtime.run_directory import RunDirectory, create_run_directory, newest_run, run_of_job

logger = logging.getLogger(__name__)

Start = tuple[RunDirectory | None, CheckpointInfo | None]


def find_start(
    config: Config, run_dir: str | Path | bool | None, resume: str, model: str, job: str | None = None
) -> Start:
    """(run directory, checkpoint to start from). Either may be None: no files wanted, a fresh start.

    A job that its launcher has started again goes on with its own run, whatever `resume` says.
    """
    if run_dir is False:
        if resume not in ("never", "auto"):
            raise CheckpointError(f"resume={resume} needs a run directory, but run_dir=False asks for none")
        return None, None
    given = Path(run_dir) if isinstance(run_dir, (str, Path)) else None
    if job is None:
        return _chosen(config, given, resume, model)
    own = run_of_job(config, given, job)
    if own is not None:
        start = CheckpointStore(own.checkpoints, config.checkpoint).newest_good()
        if start is None and resume not in ("never", "auto"):
            start = find_checkpoint(Path(resume).absolute())
        return own, start
    run, start = _chosen(config, given, resume, model)
    run.job_file.write_text(job, encoding="utf-8")
    return run, start


def _chosen(config: Config, given: Path | None, resume: str, model: str) -> tuple[RunDirectory, CheckpointInfo | None]:
    """What `resume` asks for."""
    if resume == "never":
        return create_run_directory(config, given, model), None
    if resume != "auto":
        return _from_path(config, Path(resume), given, model)
    run = RunDirectory(given) if given is not None else newest_run(config)
    start = CheckpointStore(run.checkpoints, config.checkpoint).newest_good() if run is not None else None
    if run is None or not run.config_file.exists():
        return create_run_directory(config, given, model), None
    if start is None:
        logger.warning("%s: no usable checkpoint: starting anew there", run.path)
    return run, start


def _from_path(
    config: Config, path: Path, given: Path | None, model: str
) -> tuple[RunDirectory, CheckpointInfo | None]:
    if not path.exists():
        raise CheckpointError(f"{path}: no such run or checkpoint")
    start = find_checkpoint(path.absolute())  # from inside a run, its folder is not in the path
    run = RunDirectory(start.path.parent.parent)
    newest = CheckpointStore(run.checkpoints, config.checkpoint).newest_good() if run.config_file.exists() else None
    if newest is not None and newest.path == start.path and given in (None, run.path):
        return run, start
    # The run has gone on past this checkpoint (or is not a run of ours): its later part is not to be mixed with ours.
    fork = create_run_directory(config, given, model, beside=run)
    logger.info("starting from %s in a new run directory: %s", start.path, fork.path)
    return fork, start


def check_same_training(state: Mapping[str, Any], here: Mapping[str, Any], config: Config, path: Path) -> None:
    """Refuse to go on in the middle of an epoch with other data or another plan; elsewhere say what differs."""
    then = state["source"]
    differences = [f"{key} was {then[key]} and is {here.get(key)}" for key in then if then[key] != here.get(key)]
    if differences and (state["cursor"]["step"] or "plan_version" in "".join(differences)):
        raise CheckpointError(
            f"{path}: saved in the middle of an epoch of other batches: {'; '.join(differences)}. "
            "Give the same data and settings, or resume from a checkpoint at the end of an epoch"
        )
    changed = changed_settings(state["config"], config.to_dict())
    if differences or changed:
        logger.warning("resuming %s with changes: %s", path, "; ".join([*differences, *changed]))


def check_same_base(state: Mapping[str, Any], model: nn.Module, path: Path) -> None:
    """Refuse adapters on other frozen weights than those they were trained on: the checkpoint holds only adapters."""
    then, now = state.get("base"), getattr(model, "base_fingerprint", None)
    if then != now:
        raise CheckpointError(
            f"{path}: the frozen weights that its adapters were trained on (fingerprint {then}) are not those of the "
            f"model here ({now}); give the same model.args.checkpoint and revision"
        )


def changed_settings(then: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Settings of model and training that differ from the saved ones; the rest may differ freely."""
    changed: list[str] = []
    for key in ("model", "training") if not prefix else now:
        old, new = then.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            changed += changed_settings(old, new, f"{prefix}{key}.")
        elif old != new:
            changed.append(f"{prefix}{key} was {old} and is {new}")
    return changed
