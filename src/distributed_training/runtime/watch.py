"""Watches over the ranks of a job, so that trouble on one ends all of them soon, and says where it began.

Each rank has a thread with a connection of its own to the store where the ranks met. Through it a rank that fails says
so, and one that has waited past the deadline asks every other where it stands. A rank that hangs in Python still
answers, from this thread; one that is gone does not, and that is an answer too.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from distributed_training.runtime.world import World

HUNG, FAILED_ELSEWHERE = 75, 76  # exit codes
_ANSWERS = 3.0  # seconds that ranks have to say where they stand
_AFTER_SIGNAL = 5.0  # seconds that a rank which was told to stop may stand still before it is ended


class Watch:
    """One rank's watch. The training thread says when it begins and ends to wait; the rest is this thread's."""

    def __init__(self, world: World, deadline: float, store: Any) -> None:
        self._world, self._deadline, self._store = world, deadline, store
        self._interval = min(0.5, deadline / 4)
        self._main = threading.main_thread().ident
        self._operation, self._number, self._since = "the first step", 0, 0.0
        self._closing = threading.Event()
        self._lock = threading.Lock()  # one report at a time
        self.told_to_stop: Callable[[], bool] = lambda: False
        """Whether a signal asked this process to stop: one that then stands still is ended."""
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def begin(self, operation: str) -> None:
        """The training thread now waits for other ranks. Every rank begins the same operations in the same order."""
        self._operation = operation
        self._number += 1
        self._since = time.monotonic()

    def end(self) -> None:
        """It has what it waited for."""
        self._since = 0.0

    @contextmanager
    def waiting(self, operation: str) -> Iterator[None]:
        """Around a wait for other ranks."""
        self.begin(operation)
        yield
        self._since = 0.0

    def failed(self, trace: str) -> None:
        """This rank failed: end all others and return when they are gone, so that `trace` is the last on the screen."""
        if self._closing.is_set():
            return
        with self._lock:
            try:
                said = json.dumps({"rank": self._world.rank, "trace": trace})
                first = json.loads(self._store.compare_set("failed", "", said))["rank"] == self._world.rank
            except Exception:  # the store is gone, and with it whoever could be told
                return
            if not first:  # somebody else's failure is behind this one, and its traceback matters
                self._leave(FAILED_ELSEWHERE)
            self._wait_for([f"gone/{r}" for r in self._others()], _ANSWERS)
            self._closing.set()

    def lost(self, reason: str) -> None:
        """A connection to another rank broke: find out who is gone, say so and end."""
        with self._lock:
            for _ in range(4):  # a rank that failed says why; one that was killed cannot
                if self._check("failed"):
                    self._leave(FAILED_ELSEWHERE)
                time.sleep(self._interval)
            self._sound("lost", reason)
            self._report()

    def close(self) -> None:
        """The job is over."""
        self._closing.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        still, number = 0.0, -1
        while not self._closing.wait(self._interval):
            try:
                with self._lock:
                    if self._closing.is_set():
                        return
                    self._look()
            except Exception as error:
                if not self._closing.is_set():
                    self._say(f"lost the connection to the meeting point at {self._place}: {error}".splitlines()[0])
                    self._leave(FAILED_ELSEWHERE, tell=False)
            if self.told_to_stop():
                still = still + self._interval if number == self._number and self._since else 0.0
                number = self._number
                if still > _AFTER_SIGNAL:
                    self._leave(143)

    def _look(self) -> None:
        if self._check("failed"):
            self._leave(FAILED_ELSEWHERE)
        if self._check("alarm"):
            self._report()
        if self._since and time.monotonic() - self._since > self._deadline:
            self._sound("hung", f"no progress for {self._deadline:g} s (run.deadline)")
            self._report()

    @property
    def _place(self) -> str:
        return f"{self._world.master}:{self._world.port}"

    def _others(self) -> list[int]:
        return [rank for rank in range(self._world.size) if rank != self._world.rank]

    def _check(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def _sound(self, kind: str, reason: str) -> None:
        alarm = {"kind": kind, "rank": self._world.rank, "number": self._number, "reason": reason}
        alarm["operation"] = self._operation
        self._store.compare_set("alarm", "", json.dumps(alarm))

    def _report(self) -> None:
        """Everybody says where it stands; everybody prints it; everybody leaves."""
        alarm = json.loads(self._store.get("alarm"))
        here = {
            "number": self._number,
            "operation": self._operation if self._since else f"after {self._operation}",
            "lines": _lines_of(self._main),
        }
        self._store.set(f"where/{self._world.rank}", json.dumps(here))
        keys = [f"where/{rank}" for rank in range(self._world.size)]
        self._wait_for(keys, _ANSWERS)
        where = {r: json.loads(self._store.get(key)) if self._check(key) else None for r, key in enumerate(keys)}
        self._say(describe(alarm, where))
        self._leave(HUNG)

    def _wait_for(self, keys: list[str], seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._store.check(keys):
            time.sleep(0.05)

    def _say(self, text: str) -> None:
        sys.stderr.write("".join(f"[rank {self._world.rank}] {line}\n" for line in text.splitlines()))
        sys.stderr.flush()

    def _leave(self, code: int, tell: bool = True) -> None:
        """End the process from this thread: the training thread may be anywhere. Checkpoints are whole or not there."""
        sys.stdout.flush()
        sys.stderr.flush()
        if tell:
            try:
                self._store.set(f"gone/{self._world.rank}", "")
                if self._world.rank == 0 and not self._world.hosted:  # the store lives here: others must read it first
                    self._wait_for([f"gone/{rank}" for rank in self._others()], _ANSWERS)
            except Exception:  # nobody left to tell
                pass
        os._exit(code)


def describe(alarm: dict[str, Any], where: dict[int, dict[str, Any] | None]) -> str:
    """The report: who is missing, in which operation, and where each rank stands."""
    reached = max([position["number"] for position in where.values() if position] + [alarm["number"]])
    gone = [rank for rank, position in where.items() if position is None]
    behind = [rank for rank, position in where.items() if position is not None and position["number"] < reached]
    missing = [f"rank {rank} is gone (killed, or its machine cannot be reached)" for rank in gone]
    missing += [f"rank {rank} has not arrived" for rank in behind]
    lines = [f"{alarm['reason']}, in {alarm['operation']}: {'; '.join(missing) or 'all ranks wait'}"]
    for rank, position in sorted(where.items()):
        if position is not None:
            state = "behind" if rank in behind else "waits"
            lines.append(f"  rank {rank} {state}, in {position['operation']}, at {position['lines'][0]}")
            lines += [f"      called from {line}" for line in position["lines"][1:]]
    lines.append("see docs/troubleshooting.md#a-rank-hangs-or-never-arrives")
    return "\n".join(lines)


_LIBRARIES = (f"{os.sep}torch{os.sep}", f"{os.sep}distributed_training{os.sep}", f"{os.sep}horovod{os.sep}")


def _lines_of(thread: int | None, most: int = 3) -> list[str]:
    """Where a thread stands: its innermost line, then the nearest lines of the user's own code."""
    frame = sys._current_frames().get(thread or 0)
    if frame is None:
        return ["the end"]
    stack = traceback.extract_stack(frame)[::-1]
    own = [f for f in stack if not any(part in f.filename for part in _LIBRARIES) and "<frozen" not in f.filename]
    chosen = [stack[0], *[f for f in own if f is not stack[0]]][:most]
    return [f"{Path(f.filename).name}:{f.lineno} in {f.name}: {f.line}" for f in chosen]
