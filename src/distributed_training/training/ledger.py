"""The ledger: which samples each step used, as a hash a line, so that a run can be audited afterwards."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import TracebackType

import numpy as np

_FLUSH_EVERY = 256


class Ledger:
    """Appends a line per step. Lines after the last checkpoint may be lost in a crash: those steps are done again."""

    def __init__(self, path: Path | None) -> None:
        self._file = path.open("a", encoding="utf-8") if path is not None else None
        self._steps: list[tuple[int, int, np.ndarray]] = []

    def resumed(self, epoch: int, step: int) -> None:
        """Lines before this one that name this step or later ones no longer count."""
        self.flush()
        if self._file is not None:
            self._file.write(json.dumps({"resume": {"epoch": epoch, "step": step}}) + "\n")

    def record(self, epoch: int, step: int, ids: np.ndarray) -> None:
        """Note the samples of a step."""
        self._steps.append((epoch, step, ids))  # hashed later, many at once: a third of the cost
        if len(self._steps) >= _FLUSH_EVERY:
            self.flush()

    def flush(self) -> None:
        """Hand all lines to the system."""
        if self._file is not None and self._steps:
            lines = [
                f'{{"epoch":{epoch},"step":{step},"samples":{len(ids)},"ids":"{hash_of(ids)}"}}\n'
                for epoch, step, ids in self._steps
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


def hash_of(ids: np.ndarray) -> str:
    """A short hash of sample ids in order."""
    return hashlib.blake2b(np.ascontiguousarray(ids, dtype=np.int64).data, digest_size=8).hexdigest()
