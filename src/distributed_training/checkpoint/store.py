"""The checkpoints of a run: saved in the background, the last few and the best kept, damaged ones passed over."""

from __future__ import annotations

import logging
import math
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distributed_training.checkpoint.files import (
    REPLACED,
    UNFINISHED,
    CheckpointInfo,
    read_info,
    read_state,
    remove_checkpoint,
    verify,
    write_checkpoint,
)
from distributed_training.checkpoint.staging import Staging
from distributed_training.checkpoint.tree import take_apart
from distributed_training.config import CheckpointConfig
from distributed_training.runtime.errors import CheckpointError

logger = logging.getLogger(__name__)


class CheckpointStore:
    """A folder of checkpoints. Called from the training thread; one writer thread of its own at most."""

    def __init__(self, folder: Path, config: CheckpointConfig, deadline: float = 300.0) -> None:
        self.folder, self._config, self._deadline = folder, config, deadline
        self._staging = Staging()
        self._writer: threading.Thread | None = None
        self._error: Exception | None = None
        self._committed: list[CheckpointInfo] = []

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Make the buffers for a state like this in the background: the first save is as quick as the rest then.

        After a save they are there, and its writer may still be at work.
        """
        if self._config.background and self._writer is None:
            _, tensors = take_apart(state)
            self._start(lambda: self._staging.prepare(tensors))

    def save(self, state: Mapping[str, Any], *, step: int, epoch: int, metrics: Mapping[str, float]) -> None:
        """Copy the state and write it; returns after the copy when saving in the background.

        Waits for the save before it, and raises what that one failed with.
        """
        self.wait()
        description, tensors = take_apart(state)
        metrics = dict(metrics)  # the caller's may change while this is written
        self._staging.copy(tensors)
        if self._config.background:
            self._start(lambda: self._write(description, step, epoch, metrics))
        else:
            self._write(description, step, epoch, metrics)

    def wait(self) -> None:
        """Wait until nothing is being written; raise the error of the last write if it failed."""
        if self._writer is not None:
            self._writer.join(self._deadline)
            if self._writer.is_alive():
                raise CheckpointError(
                    f"{self.folder}: a checkpoint is still being written after {self._deadline:g} s; "
                    "the disk may hang. A larger run.deadline waits longer"
                )
            self._writer = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def committed(self) -> list[CheckpointInfo]:
        """Checkpoints committed since the last call."""
        new, self._committed = self._committed, []
        return new

    def all(self) -> list[CheckpointInfo]:
        """Every checkpoint whose manifest can be read, oldest first."""
        found = []
        for path in sorted(self.folder.glob("step-*")):
            try:
                found.append(read_info(path))
            except CheckpointError as error:
                logger.debug("passed over: %s", error)
        return found

    def best(self) -> CheckpointInfo | None:
        """The best checkpoint by the metric watched, among those that have it."""
        return best_of(self.all(), self._config.monitor, self._config.mode)

    def newest_good(self) -> CheckpointInfo | None:
        """The newest checkpoint that is whole; damaged ones are passed over with a warning."""
        for path in sorted(self.folder.glob("step-*"), reverse=True):
            try:
                verify(path)
                return read_info(path)
            except CheckpointError as error:
                logger.warning("checkpoint passed over: %s", error)
        return None

    def load(self, info: CheckpointInfo) -> Any:
        """The state of a checkpoint."""
        return read_state(info.path)

    def _start(self, work: Any) -> None:
        def run() -> None:
            try:
                work()
            except Exception as error:
                self._error = error

        self._writer = threading.Thread(target=run, name="checkpoint-writer", daemon=True)
        self._writer.start()

    def _write(self, description: Any, step: int, epoch: int, metrics: Mapping[str, float]) -> None:
        info = write_checkpoint(self.folder, self._staging, description, step=step, epoch=epoch, metrics=metrics)
        self._committed.append(info)
        verify(info.path)  # older ones go only when the new one is known to be whole
        self.prune(info.step)

    def prune(self, step: int) -> None:
        """Remove what is not to be kept, now that the checkpoint of this step is known to be whole."""
        # Later ones than the one just written are damaged (or the run would not have come by here): they count as none.
        checkpoints = [info for info in self.all() if info.step <= step]
        keep = {info.path for info in checkpoints[-self._config.keep :]}
        best = best_of(checkpoints, self._config.monitor, self._config.mode)
        if self._config.keep_best and best is not None:
            keep.add(best.path)
        for info in checkpoints:
            if info.path not in keep:
                remove_checkpoint(info.path)
        for pattern in (UNFINISHED, REPLACED):  # what a crash left
            for path in self.folder.glob(f"{pattern}*"):
                shutil.rmtree(path, ignore_errors=True)


def best_of(checkpoints: list[CheckpointInfo], monitor: str, mode: str) -> CheckpointInfo | None:
    """The one with the best value of a metric; None if none has a finite one."""
    sign = 1 if mode == "min" else -1
    scored = [info for info in checkpoints if math.isfinite(info.metrics.get(monitor, math.nan))]
    return min(scored, key=lambda info: sign * info.metrics[monitor], default=None)


def find_checkpoint(path: Path) -> CheckpointInfo:
    """The checkpoint a user means by a path: a checkpoint itself, a run, or a folder of checkpoints."""
    if (path / "manifest.json").is_file():
        verify(path)
        return read_info(path)
    for folder in (path / "checkpoints", path):
        info = CheckpointStore(folder, CheckpointConfig()).newest_good()
        if info is not None:
            return info
    raise CheckpointError(f"{path}: no usable checkpoint there")
