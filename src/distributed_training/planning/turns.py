"""Trainings that take turns: one is timed while the others sleep between two of their steps.

A machine's speed drifts, by other programs or by whoever shares its cores. What a prediction is made from and what it
is compared with are measured by turns, so that drift meets both. Orders and answers are files in a folder:
`go-3` begins the third turn, `done-3-NAME` holds what one process found, `over` ends all of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from distributed_training.runtime.errors import BenchError
from distributed_training.verify.running import end_program, last_lines, start_program

_LOOK = 0.005  # seconds between two looks for a file
_ENDING = 20.0  # seconds for processes that were told that there is no more to do


class Taker:
    """The side of a process that is measured."""

    def __init__(self, folder: Path, name: str, deadline: float) -> None:
        self._folder, self._name, self._deadline = folder, name, deadline
        self._turn = 0
        self._parent = os.getppid()

    def wait(self) -> bool:
        """Sleep until it is our turn; False where there is none any more."""
        self._turn += 1
        end = time.monotonic() + self._deadline
        while not (self._folder / f"go-{self._turn}").exists():
            if (self._folder / "over").exists() or os.getppid() != self._parent:
                return False
            if time.monotonic() > end:
                raise BenchError(f"{self._name}: no turn within {self._deadline:g} s")
            time.sleep(_LOOK)
        return True

    def done(self, found: Mapping[str, Any]) -> None:
        """Say what the turn gave."""
        written = self._folder / f"writing-{self._name}"
        written.write_text(json.dumps(dict(found)), encoding="utf-8")
        written.rename(self._folder / f"done-{self._turn}-{self._name}")


class Giver:
    """The side that gives turns to the processes of one training. Use it in `with`: they are ended at its end."""

    def __init__(self, folder: Path, names: Sequence[str], timeout: float) -> None:
        """`names`: of the processes that answer, in `folder`."""
        self._folder, self._names, self._timeout = folder, list(names), timeout
        self._processes: list[tuple[subprocess.Popen[bytes], Path]] = []
        self._turn = 0

    def start(self, launcher: str, ranks: int, program: list[str], variables: Mapping[str, str], own: Path) -> None:
        """Start processes; `own`: a folder for what they write."""
        self._processes.append((start_program(launcher, ranks, program, variables, own), own))

    def turn(self) -> list[dict[str, Any]]:
        """What every process found in a turn."""
        self._turn += 1
        files = [self._folder / f"done-{self._turn}-{name}" for name in self._names]
        (self._folder / f"go-{self._turn}").touch()
        end = time.monotonic() + self._timeout
        while not all(file.exists() for file in files):
            for process, own in self._processes:
                if process.poll() is not None:
                    raise BenchError(f"exit code {process.returncode}: {_last(own)}")
            if time.monotonic() > end:
                raise BenchError(f"not done after {self._timeout:g} s (--timeout): {_last(self._processes[0][1])}")
            time.sleep(_LOOK)
        return [json.loads(file.read_text(encoding="utf-8")) for file in files]

    def __enter__(self) -> Giver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        (self._folder / "over").touch()
        for process, _ in self._processes:
            try:
                if kind is None:
                    process.wait(_ENDING)
            except subprocess.TimeoutExpired:
                pass
            finally:
                end_program(process)


def _last(folder: Path) -> str:
    return next((line for line in reversed(last_lines(folder)) if line.strip()), "it said nothing")
