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
from distributed_training.runtime.run_directory import RunDirectory, read_jsonl
from distributed_training.split.serving import kind_of_data
from distributed_training.training import Trainer
from distributed_training.training.job import Job, build_job, build_trainer

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


@contextmanager
def load_model(path: Path, overrides: list[str] | None, which: str) -> Iterator[tuple[Trainer, Path]]:
    """(trainer with the run's model, checkpoint used). Where loaders fed the run, no data is needed for it."""
    run = RunDirectory(path)
    config = config_of_run(run, overrides)
    told = [line["told"] for line in read_jsonl(run.ledger_file) if "told" in line]
    if told:
        trainer = build_trainer(config, *kind_of_data(told[-1]), run_dir=False)
    else:
        job = build_job(config, run_dir=False)
        job.train_data.close()
        trainer = job.trainer
    try:
        yield trainer, trainer.load(_choose(CheckpointStore(run.checkpoints, config.checkpoint), which))
    finally:
        trainer.close()


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
