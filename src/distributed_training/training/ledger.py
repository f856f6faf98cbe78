"""The ledger: which samples each step used, as a hash a line, so that a run can be audited afterwards."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

_FLUSH_EVERY = 256


class Ledger:
    """Appends a line per step. Lines after the last checkpoint may be lost in a crash: those steps are done again."""

    def __init__(self, path: Path | None) -> None:
        self._file = path.open("a", encoding="utf-8") if path is not None else None
        self._steps: list[tuple[int, int, np.ndarray, np.ndarray | None]] = []

    def fed(self, source: Mapping[str, Any], told: Mapping[str, Any]) -> None:
        """The samples come from other machines: what they are can be asked of nobody here later on."""
        self._line({"fed": dict(source), "told": dict(told)})

    def resumed(self, epoch: int, step: int) -> None:
        """Lines before this one that name this step or later ones no longer count."""
        self._line({"resume": {"epoch": epoch, "step": step}})

    def _line(self, line: dict[str, Any]) -> None:
        self.flush()
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")

    def record(self, epoch: int, step: int, ids: np.ndarray, skipped: np.ndarray | None = None) -> None:
        """Note the samples of a step, and those of its plan that could not be loaded."""
        self._steps.append((epoch, step, ids, skipped))  # hashed later, many at once: a third of the cost
        if len(self._steps) >= _FLUSH_EVERY:
            self.flush()

    def flush(self) -> None:
        """Hand all lines to the system."""
        if self._file is not None and self._steps:
            lines = [
                f'{{"epoch":{epoch},"step":{step},"samples":{len(ids)},"ids":"{hash_of(ids)}"{_left_out(skipped)}}}\n'
                for epoch, step, ids, skipped in self._steps
            ]
            self._file.write("".join(lines))
            self._file.flush()
        self._steps.clear()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None


def _left_out(skipped: np.ndarray | None) -> str:
    return "" if skipped is None else f',"skipped":{json.dumps(skipped.tolist())}'


def hash_of(ids: np.ndarray) -> str:
    """A short hash of sample ids in order."""
    return hashlib.blake2b(np.ascontiguousarray(ids, dtype=np.int64).data, digest_size=8).hexdigest()
