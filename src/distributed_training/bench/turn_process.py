"""One variant of a benchmark in a process of its own, which works only when it has its turn.

Variants change settings of their process (allocator, precision switches, compilers, hooks of libraries), so none shares
one with another. Yet they take turns: a process sets up once, then waits for orders, each answered when it is done.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from distributed_training.runtime.errors import BenchError

_TAIL = 1500  # characters of what a process said before it died
_ENDING = 10.0  # seconds that a process may take to end when it is told to


class TurnProcess:
    """Runs `target` (`module:function`, see `turn_worker`) with `arguments` in a new interpreter.

    It imports what it needs at once, and sets up when it is told to (`ready`): several may import side by side.
    Every wait has the deadline `timeout`; what the process prints is shown only if it fails.
    """

    def __init__(self, name: str, target: str, arguments: dict[str, Any], timeout: float) -> None:
        self.name, self._timeout = name, timeout
        orders, self._orders = os.pipe()
        self._answers, answers = os.pipe()
        self._folder = tempfile.mkdtemp(prefix="dtrain-bench-")
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close)
        command = [sys.executable, "-W", "ignore", "-m", "distributed_training.bench.turn_worker"]
        self._process = subprocess.Popen(
            [*command, target, json.dumps(arguments), str(orders), str(answers), self._folder],
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=self._said,
            pass_fds=(orders, answers),
            start_new_session=True,  # its own children end with it, and Ctrl-C is for us alone
        )
        os.close(orders)
        os.close(answers)
        self._unread, self._imported = b"", False

    def ready(self) -> dict[str, Any]:
        """Have it set up and wait until it has; gives what it said of itself."""
        self.wait_for_imports()
        return self.turn()

    def wait_for_imports(self) -> None:
        """Wait until it has only to be told to set up."""
        if not self._imported:
            self._answer()
            self._imported = True

    def turn(self, **order: Any) -> dict[str, Any]:
        """Have it do its work once and wait for what it measured."""
        try:
            os.write(self._orders, json.dumps(order).encode() + b"\n")
        except BrokenPipeError:
            raise self._failed("ended before its turn") from None
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        end = time.monotonic() + self._timeout
        while b"\n" not in self._unread:
            if not select.select([self._answers], [], [], max(0.0, end - time.monotonic()))[0]:
                self._kill()
                raise self._failed(f"gave no answer within {self._timeout:g} s (raise --timeout)")
            chunk = os.read(self._answers, 65536)
            if not chunk:
                raise self._failed("ended without an answer")
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise BenchError(f"{self.name}: {answer['error']}")
        return answer

    def _failed(self, what: str) -> BenchError:
        self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, self._said.tell() - _TAIL))
        said = self._said.read().decode(errors="replace").strip()
        return BenchError(f"{self.name}: its process {what}" + (f"; its last words:\n{said}" if said else ""))

    def close(self) -> None:
        """End it and whatever it has started."""
        if self._orders < 0:
            return
        os.close(self._orders)  # the end of its orders
        self._orders = -1
        try:
            self._process.wait(_ENDING)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._kill()
            os.close(self._answers)
            self._said.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
