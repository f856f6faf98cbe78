"""TensorBoard: `tensorboard --logdir runs` shows the curves of all runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from distributed_training.config import TrackingConfig
from distributed_training.runtime.imports import require
from distributed_training.tracking.base import RunInfo, Tracker

FLUSH_SECONDS = 15  # what a killed process may lose, and how late the curves are


class TensorBoardTracker(Tracker):
    """Writes scalars, and config and facts as text, to the run's `tensorboard` folder."""

    def __init__(self, config: TrackingConfig | None = None) -> None:
        require("tensorboard", "tensorboard", "tracking.trackers=tensorboard")
        self._writer: Any = None
        self._step = 0

    def start(self, run: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter  # seconds to import, so not before it is needed

        # What the earlier process logged past its last checkpoint is trained again: TensorBoard hides it.
        purge_step = None if run.resumed_from is None else run.resumed_from + 1
        self._step = run.resumed_from or 0
        self._writer = SummaryWriter(run.directory / "tensorboard", purge_step=purge_step, flush_secs=FLUSH_SECONDS)
        self._writer.add_text("config", _as_text(run.config), self._step)
        self._writer.add_text("facts", _as_text(run.facts), self._step)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._step = step
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, status: str, summary: Mapping[str, float]) -> None:
        if self._writer is None:
            return
        try:
            self._writer.add_text("result", _as_text({"status": status, **summary}), self._step)
        finally:
            self._writer.close()
            self._writer = None


def _as_text(values: Mapping[str, Any]) -> str:
    """Indented JSON in a Markdown code block, which is how TensorBoard keeps the line breaks."""
    lines = json.dumps(dict(values), indent=2, default=str).splitlines()
    return "\n".join(f"    {line}" for line in lines)
