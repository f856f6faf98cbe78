"""A run's model with the weights of one of its checkpoints, and its held-out data."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from distributed_training.checkpoint import CheckpointStore, verify
from distributed_training.cli.settings import config_of_run
from distributed_training.data import Loader
from distributed_training.runtime.errors import CheckpointError
from distributed_training.runtime.run_directory import RunDirectory
from distributed_training.training.job import Job, build_job

logger = logging.getLogger(__name__)


@contextmanager
def load_trained(path: Path, overrides: list[str] | None, which: str) -> Iterator[tuple[Job, Loader, Path]]:
    """(job, held-out data or else the training data in order, checkpoint used)."""
    run = RunDirectory(path)
    config = config_of_run(run, overrides)
    with build_job(config, run_dir=False) as job:
        used = job.trainer.load(_choose(CheckpointStore(run.checkpoints, config.checkpoint), which))
        if job.val_data is None:
            logger.warning("%s has no held-out data: its training data is used", path)
        data = job.val_data or job.train_data.in_order()
        try:
            yield job, data, used
        finally:
            data.close()


def _choose(store: CheckpointStore, which: str) -> Path:
    if which not in ("best", "last"):
        return Path(which)
    best = store.best() if which == "best" else None
    if best is not None:
        try:
            verify(best.path)
            return best.path
        except CheckpointError as error:
            logger.warning("the best checkpoint is passed over: %s", error)
    newest = store.newest_good()
    if newest is None:
        raise CheckpointError(f"{store.folder}: no usable checkpoint there")
    return newest.path
