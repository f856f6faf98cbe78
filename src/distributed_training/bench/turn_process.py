"""One variant of a benchmark in a process of its own, or in a job of several ranks, which works only in its turn.

Variants change settings of their process (allocator, precision switches, compilers, hooks of libraries), so none shares
one with another. Yet they take turns: a process sets up once, then waits for orders, each answered when it is done.
Orders and answers are lines of JSON in two pipes with names for each rank, which ranks of any launcher can open.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from distributed_training.runtime.errors import BenchError
from distributed_training.verify.running import end_program, last_lines, start_program

_ENDING = 20.0  # seconds that processes may take to end when there is no more to do
_LOOK = 0.2  # seconds between two looks at whether they are still there


@dataclass(frozen=True)
class Start:
    """How a variant is started: `target` is `module:function`, see `turn_worker`."""

    target: str
    arguments: dict[str, Any]
    ranks: int = 1
    launcher: str = "none"
    """Who starts the ranks, as `verify.running` names it."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the ranks."""


class TurnProcess:
    """Runs a target in a new interpreter, or in one for each rank. What they print is shown only if they fail.

    It imports what it needs at once, and sets up when it is told to (`ready`): several may import side by side.
    Every wait has the deadline `timeout`. It is over with `close`, or when this process is gone.
    """

    def __init__(self, name: str, start: Start, timeout: float) -> None:
        self.name, self._start, self._timeout = name, start, timeout
        self._folder = Path(tempfile.mkdtemp(prefix="dtrain-bench-"))
        self._orders, self._answers = self._pipes("orders"), self._pipes("answers")
        self._unread = dict.fromkeys(self._answers, b"")
        self._imported, self._busy = False, True
        try:
            self._process = self._launch()
        except BaseException:
            self._clear()
            raise

    def _pipes(self, what: str) -> list[int]:
        paths = [self._folder / f"{what}-{rank}" for rank in range(self._start.ranks)]
        for path in paths:
            os.mkfifo(path)
        # Open for both: opening does not wait for the rank, and only when we are gone does it read an end.
        return [os.open(path, os.O_RDWR) for path in paths]

    def _launch(self) -> subprocess.Popen[bytes]:
        start = self._start
        alone = start.launcher == "none"
        task = {"target": start.target, "arguments": start.arguments, "alone": alone}
        (self._folder / "task.json").write_text(json.dumps(task), encoding="utf-8")
        # Compilers keep what they made among temporary files: only launchers, which leave them behind, have their own.
        temporary = {"TMPDIR": tempfile.gettempdir()} if alone else {}
        variables = {"PYTHONWARNINGS": "ignore", **temporary, **start.variables}
        program = ["-m", "distributed_training.bench.turn_worker", str(self._folder)]
        return start_program(start.launcher, start.ranks, program, variables, self._folder / "launch")

    def ready(self) -> dict[str, Any]:
        """Have it set up and wait until it has; gives what it said of itself."""
        self.wait_for_imports()
        return self.turn()

    def wait_for_imports(self) -> None:
        """Wait until it has only to be told to set up."""
        if not self._imported:
            self.finish()
            self._imported = True

    def turn(self, **order: Any) -> dict[str, Any]:
        """Have it do its work once and wait for what it measured.

        Of several ranks it is the largest of each value: a step is as slow as its slowest rank.
        """
        self.begin(**order)
        return self.finish()

    def begin(self, **order: Any) -> None:
        """Have it do its work; `finish` waits for that. So several can be at work at once."""
        self._busy = True
        for pipe in self._orders:
            os.write(pipe, json.dumps(order).encode() + b"\n")

    def finish(self) -> dict[str, Any]:
        """Wait for what it measured."""
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + self._timeout
        while waiting := [pipe for pipe in self._answers if pipe not in answers]:
            code = self._process.poll()  # before looking for what it may have said at last
            readable = select.select(waiting, [], [], _LOOK)[0]
            for pipe in readable:
                self._unread[pipe] += os.read(pipe, 65536)
                line, end, rest = self._unread[pipe].partition(b"\n")
                if end:
                    answers[pipe], self._unread[pipe] = self._checked(json.loads(line)), rest
            if code is not None and not readable:
                raise self._failed(f"ended with code {code} and without an answer")
            if time.monotonic() > deadline and not readable:
                raise self._failed(f"gave no answer within {self._timeout:g} s (raise --timeout)")
        self._busy = False
        return _largest([answers[pipe] for pipe in self._answers])

    def _checked(self, answer: dict[str, Any]) -> dict[str, Any]:
        if "error" in answer:
            raise BenchError(f"{self.name}: {answer['error']}")
        return answer

    def _failed(self, what: str) -> BenchError:
        end_program(self._process)
        ranks, said = self._start.ranks, last_lines(self._folder / "launch")
        who = "its process" if ranks == 1 else f"its job of {ranks} ranks"
        words = ["; its last words:", *said] if said else [""]
        return BenchError(f"{self.name}: {who} {what}" + "\n    ".join(words))

    def dismiss(self) -> None:
        """Tell it that there is no more to do. `close` waits for its end."""
        while self._orders:
            os.close(self._orders.pop())

    def close(self) -> None:
        """End it and whatever it has started."""
        if not self._answers:  # done already
            return
        self.dismiss()
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(0 if self._busy else _ENDING)
        finally:
            end_program(self._process)
            with suppress(ProcessLookupError, PermissionError):  # its children, where it left some
                os.killpg(self._process.pid, signal.SIGKILL)
            self._clear()

    def _clear(self) -> None:
        self.dismiss()
        while self._answers:
            os.close(self._answers.pop())
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _largest(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """One answer of all ranks. Of the memory that is free it is the least."""
    if len(answers) == 1:
        return answers[0]
    return {key: (min if key == "free_bytes" else max)(one[key] for one in answers) for key in answers[0]}
