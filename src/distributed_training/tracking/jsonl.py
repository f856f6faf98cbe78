"""The record that every run keeps: `events.jsonl` in its folder, one JSON object a line.

    {"event": "start", "time": ..., "name": ..., "resumed_from": null, "facts": {...}}
    {"event": "metrics", "time": ..., "step": 10, "train_loss": 2.1, "lr": 0.001, ...}
    {"event": "checkpoint", "time": ..., "step": 100, "path": "checkpoints/...", "val_loss": 1.9, ...}
    {"event": "finish", "time": ..., "status": "completed", "val_loss": 0.3, ...}

`time` is in seconds since 1970. A path inside the run's folder is relative to it, so that the folder can be moved. JSON
has no NaN and no infinity: both are written as null. A metric must not bear one of the names above: they win over it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from distributed_training.config import TrackingConfig
from distributed_training.runtime.run_directory import RunDirectory
from distributed_training.tracking.base import RunInfo, Tracker

_encode = json.JSONEncoder(allow_nan=False).encode  # json.dumps would make an encoder for every line


class JsonlTracker(Tracker):
    """Appends events to the run's `events.jsonl`. Every other tool of this package reads that file."""

    def __init__(self, config: TrackingConfig | None = None) -> None:
        self._directory: Path | None = None
        self._file: BinaryIO | None = None

    def start(self, run: RunInfo) -> None:
        self._directory = run.directory
        path = RunDirectory(run.directory).events_file
        path.parent.mkdir(parents=True, exist_ok=True)
        cut_off = _ends_inside_a_line(path)
        self._file = path.open("ab")
        if cut_off:  # a crash left half a line: only that line may be lost, not ours glued to it
            self._file.write(b"\n")
        self._write({"event": "start", "name": run.name, "resumed_from": run.resumed_from, "facts": run.facts})

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._write({"event": "metrics", "step": step}, metrics)

    def checkpoint(self, path: Path, step: int, metrics: Mapping[str, float]) -> None:
        if self._directory is not None and path.is_relative_to(self._directory):
            path = path.relative_to(self._directory)
        self._write({"event": "checkpoint", "step": step, "path": str(path)}, metrics)

    def finish(self, status: str, summary: Mapping[str, float]) -> None:
        if self._file is None:
            return
        try:
            self._write({"event": "finish", "status": status}, summary)
        finally:
            self._file.close()
            self._file = None

    def _write(self, event: Mapping[str, Any], metrics: Mapping[str, float] | None = None) -> None:
        if self._file is None:
            raise RuntimeError("start() comes before any other call")
        line = {"event": event["event"], "time": round(time.time(), 3), **event}
        line.update((name, value) for name, value in (metrics or {}).items() if name not in line)
        try:  # plain finite numbers nearly always: the loop waits for this
            text = _encode(line)
        except (TypeError, ValueError):
            text = _encode(_plain(line))
        self._file.write(text.encode() + b"\n")
        self._file.flush()  # to the kernel: a killed process loses nothing, a killed machine the last seconds


def _ends_inside_a_line(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"


def _plain(value: Any) -> Any:
    """`value` in terms of JSON: non-finite numbers as null, NumPy and torch scalars as numbers, the rest as text."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if hasattr(value, "item"):
        try:
            return _plain(value.item())
        except (TypeError, ValueError, RuntimeError):  # an array of several values
            return str(value)
    return str(value)
