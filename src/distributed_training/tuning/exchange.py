"""Checkpoints that go from one trial to another in population-based training.

Ray decides which trial goes on from whose checkpoint, and carries a note with its path. The checkpoint itself is a link
beside the run that made it, which that run's own clean-up does not reach.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed_training.runtime.errors import CheckpointError

_NOTE, _OFFERED = "note.json", "exchange"
_KEPT = 4  # checkpoints of each trial that others may still ask for
_ORIGIN = "came_from"


@dataclass(frozen=True)
class Start:
    """Where a trial goes on."""

    directory: Path
    """Its run directory: a new one each time it takes over another trial's weights."""
    resume: str
    """As `checkpoint.resume` has it."""


@contextmanager
def offer(search: Path, trial: str, checkpoint: Path, metrics: Mapping[str, Any]) -> Iterator[str]:
    """A folder for Ray to carry: the note that says where this checkpoint of the trial is."""
    kept = search / _OFFERED / trial / checkpoint.name
    if not kept.exists():
        part = kept.with_name(f".{kept.name}-{os.getpid()}")
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(checkpoint, part, copy_function=_link)
        part.rename(kept)
        for old in sorted(kept.parent.glob("step-*"))[:-_KEPT]:
            shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="dtrain-trial-") as folder:
        note = {"trial": trial, "checkpoint": str(kept), "directory": metrics.get("run_directory", "")}
        Path(folder, _NOTE).write_text(json.dumps(note), encoding="utf-8")
        yield folder


def read(folder: Path) -> dict[str, Any]:
    """The note that Ray carried."""
    try:
        note = json.loads((folder / _NOTE).read_text(encoding="utf-8"))
        return {key: str(note[key]) for key in ("trial", "checkpoint", "directory")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}: not what a trial of ours left there: {error}") from None


def find_start(trials: Path, trial: str, note: Mapping[str, str] | None) -> Start:
    """Where a trial goes on: in its newest run, or with another trial's weights in a new run of its own."""
    own = sorted(trials.glob(f"{trial}+*"), key=lambda path: int(path.name.rpartition("+")[2]))
    newest = own[-1] if own else trials / trial
    if note is None or note["trial"] == trial:
        return Start(newest, "auto")
    origin = newest / _ORIGIN
    again = origin.is_file() and origin.read_text(encoding="utf-8") == note["checkpoint"]
    if again and any(newest.glob("checkpoints/step-*")):  # a second attempt, which goes on from its own
        return Start(newest, "auto")
    new = trials / f"{trial}+{len(own) + 1}"
    new.mkdir(parents=True)
    (new / _ORIGIN).write_text(note["checkpoint"], encoding="utf-8")
    return Start(new, note["checkpoint"])


def _link(source: str, target: str) -> None:
    """The same file under a second name where the file system can do that, a copy elsewhere."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
