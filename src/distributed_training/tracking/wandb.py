"""Weights & Biases: the curves of all runs on a web page, online or synced later with `wandb sync`."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distributed_training.config import TrackingConfig
from distributed_training.runtime.imports import require
from distributed_training.tracking.base import RunInfo, Tracker

logger = logging.getLogger(__name__)

ID_FILE = "wandb_id"
START_SECONDS = 30.0  # how long the start of the training waits for the W&B server
SUCCESS = ("completed", "stopped early")


class WandbTracker(Tracker):
    """Sends metrics to W&B. A resumed run continues the same W&B run, whose id is kept in the run's folder.

    `tracking.mode=offline` is final; with `online`, the variable WANDB_MODE still decides. Without an API key it raises
    and never asks for one. A W&B run that the program has open already is used, and left open.
    """

    def __init__(self, config: TrackingConfig | None = None) -> None:
        self._wandb: Any = require("wandb", "wandb", "tracking.trackers=wandb")
        self._config = config or TrackingConfig()
        self._run: Any = None
        self._ours = True

    def start(self, run: RunInfo) -> None:
        self._ours = self._wandb.run is None
        if not self._ours:
            self._run = self._wandb.run
            self._run.config.update({**run.config, "facts": dict(run.facts)}, allow_val_change=True)
            return
        try:
            self._run = self._open(run)
        except BaseException:  # nobody calls finish() now, and W&B's service would stay behind
            self._close_service()
            raise
        where = self._run.url or f"{Path(self._run.dir).parent} (offline; send it with `wandb sync`)"
        logger.info("W&B run %s: %s", self._run.id, where)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def checkpoint(self, path: Path, step: int, metrics: Mapping[str, float]) -> None:
        if not self._config.upload_checkpoints:
            return
        artifact = self._wandb.Artifact(f"checkpoint-{self._run.id}", "model", metadata={"step": step, **metrics})
        artifact.add_dir(str(path))  # copied aside, so that the run's clean-up may remove the folder
        self._run.log_artifact(artifact, aliases=["latest", f"step-{step}"])

    def finish(self, status: str, summary: Mapping[str, float]) -> None:
        if self._run is None:
            return
        run, self._run = self._run, None
        try:
            run.summary.update({**summary, "status": status})
            if self._ours:
                run.finish(exit_code=0 if status in SUCCESS else 1)
        finally:
            if self._ours:
                self._close_service()

    def _open(self, run: RunInfo) -> Any:
        wandb, config = self._wandb, self._config
        deadline = float(run.config.get("run", {}).get("deadline", 300.0))
        # Silent for the whole library, not just for this run: otherwise a missing key is asked for on the terminal.
        wandb.setup(settings=wandb.Settings(silent=True))
        settings = {"silent": True, "init_timeout": min(START_SECONDS, deadline), "finish_timeout": deadline}
        return wandb.init(
            project=config.project,
            entity=config.entity,
            group=config.group,
            tags=config.tags,
            mode="offline" if config.mode == "offline" else None,
            dir=str(run.directory),
            name=run.name,
            config={**run.config, "facts": dict(run.facts)},
            allow_val_change=True,
            id=_run_id(run.directory),
            resume="allow",
            settings=wandb.Settings(**{k: v for k, v in settings.items() if k in wandb.Settings.model_fields}),
        )

    def _close_service(self) -> None:
        """End W&B's background process and threads."""
        try:
            self._wandb.teardown()
        except SystemExit as error:  # W&B ends the whole program when its service fails; a tracker must not
            raise RuntimeError(f"the W&B service ended with status {error.code}") from None


def _run_id(directory: Path) -> str:
    """The id in W&B of the run in this folder: the one it had before, or a new one."""
    file = directory / ID_FILE
    if file.is_file() and (known := file.read_text().strip()):
        return known
    new = uuid.uuid4().hex[:8]
    file.write_text(new + "\n")
    return new
