"""Watches over the ranks of a job, so that trouble on one ends all of them soon, and says where it began.

Each rank has a thread with a connection of its own to the store where the ranks met. Through it a rank that fails says
so, and one that has waited past the deadline asks every other where it stands. A rank that hangs in Python still
answers, from this thread; one that is gone does not, and that is an answer too.

What the ranks write there, R being the number of a rank:

    who/R    host and process        failed   the first failure: its rank and traceback
    beat/R   counts while it lives   alarm    the first wait that was too long, or the first broken connection
    left/R   it left in peace        where/R  where it stood when it saw the alarm
    free/R   it needs the store no longer
"""

from __future__ import annotations

import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from distributed_training.runtime.hang_report import (
    GONE_HELP,
    KILLED,
    SILENT,
    Standing,
    describe,
    lines_of,
    silent_ranks,
    standing,
)
from distributed_training.runtime.timed_store import StoreLost, StoreSilent, TimedStore
from distributed_training.runtime.world import World

HUNG, FAILED_ELSEWHERE = 75, 76  # exit codes
_INTERVAL = 0.5  # seconds between two looks at the store
_ANSWERS = 4.0  # seconds that ranks have to say where they stand
_GRACE = 1.0  # seconds that a rank which does not wait has to end by itself after a failure elsewhere
_AFTER_SIGNAL = 5.0  # seconds that a rank which was told to stop may wait for one that gives no sign of life
_PAUSE = 2.0  # seconds: a thread that sleeps so much longer than it wished was stopped with its process


class Watch:
    """One rank's watch. The training thread says when it begins and ends to wait; the rest is this thread's."""

    def __init__(self, world: World, deadline: float, store: Any) -> None:
        self.world, self._deadline = world, deadline
        self._interval = min(_INTERVAL, deadline / 4)
        self._trainer, self._process = threading.get_ident(), os.getpid()
        self._operation, self._number, self._since = "the start", 0, 0.0
        self._closing = threading.Event()
        self._ending, self._ends = threading.RLock(), False
        self._failed_at = 0.0  # when a failure elsewhere was seen
        self._still: tuple[int, float, list[str | None]] | None = None
        self._keeper = "the launcher" if world.hosted else "rank 0"
        self._keeper_left = False
        self.told_to_stop: Callable[[], bool] = lambda: False
        """Whether a signal asked this process to stop: one that then waits for a silent rank is ended."""
        self.before_leaving: Callable[[str, str], None] = lambda message, trace: None
        """Called before this process ends because of another rank, with what happened there."""
        self._thread: threading.Thread | None = None
        if world.size > 1:
            self._store = TimedStore(store, deadline, (world.master or "127.0.0.1", world.port))
            self._store.set(f"who/{world.rank}", f"{platform.node()}, process {os.getpid()}")
            self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
            self._thread.start()

    def begin(self, operation: str) -> None:
        """The training thread now waits for other ranks. Every rank begins the same operations in the same order.

        To begin again before the end is a part of the same wait: progress, but not another operation to count.
        """
        self._operation = operation
        if not self._since:
            self._number += 1
        self._since = time.monotonic()

    def end(self) -> None:
        """It has what it waited for."""
        self._since = 0.0

    @contextmanager
    def waiting(self, operation: str) -> Iterator[None]:
        """Around a wait for other ranks. Inside of another one it is a part of that."""
        inside = self._since > 0
        self.begin(self._operation if inside else operation)
        try:
            yield
        finally:
            self._since = time.monotonic() if inside else 0.0

    def failing(self, trace: str) -> bool:
        """An exception is about to end this rank: tell the others. Whether it is the first to fail."""
        if not self._alive:
            return True
        self._ends = True  # whoever reports the exception does the rest
        try:
            said = json.dumps({"rank": self.world.rank, "trace": trace})
            first = json.loads(self._store.set_first("failed", said, _ANSWERS))
        except StoreLost:  # and with it whoever could be told
            return True
        return bool(first["rank"] == self.world.rank)

    def failed(self, trace: str, code: int) -> None:
        """This rank failed: end all others and return when they are gone, so that `trace` is the last on the screen.

        Where another rank failed before, its traceback is the one that matters: this process ends here, with `code`.
        """
        if not self._alive or not self._claim_end():
            return
        if not self.failing(trace):
            self._leave(code)
        self._part(last=True)

    def lost(self, reason: str, lines: list[str]) -> None:
        """A connection to another rank broke, at these lines: find out who is gone, say so and end the process."""
        if not self._alive or not self._claim_end():
            return
        self._since = time.monotonic()  # the exception ended its wait; it is what it did last all the same
        try:
            for _ in range(4):  # a rank that failed says why; one that was killed cannot
                time.sleep(self._interval)
                if self._store.has("failed", within=_ANSWERS):
                    self._leave_after_failure()
            self._sound("lost", reason)
            self._report(lines)
        except StoreLost as error:
            self._report_alone(error, lines)

    def close(self) -> None:
        """The job is over. Safe to call twice."""
        if self._thread is None or not self._alive:
            return
        self._closing.set()
        self._thread.join(timeout=5)
        if not self._keeper_left and not self._ends:
            with suppress(StoreLost):
                self._store.set(f"left/{self.world.rank}", "", _ANSWERS)
            self._part()
        self._store.close()

    @property
    def _alive(self) -> bool:
        """A forked child has the connection, but not the thread."""
        return self._thread is not None and not self._closing.is_set() and os.getpid() == self._process

    @property
    def _keeps(self) -> bool:
        """Whether the store lives in this process."""
        return self.world.rank == 0 and not self.world.hosted

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.world.size) if rank != self.world.rank]

    # Watching

    def _run(self) -> None:
        if not self.world.hosted:
            with suppress(StoreLost):  # found again below, where it is reported
                self._store.wait_for(["who/0"], _ANSWERS)
                self._keeper = f"rank 0 ({self._store.get('who/0')})"
        while not self._keeper_left:
            asleep = time.monotonic()
            if self._closing.wait(self._interval) or self._ends:
                return
            self._forgive_pause(time.monotonic() - asleep - self._interval)
            try:
                trouble = self._look()
                if trouble is not None and self._claim_end():
                    trouble()
            except StoreLost as error:
                if not self._closing.is_set() and self._claim_end():
                    self._report_alone(error, lines_of(self._trainer))

    def _forgive_pause(self, late: float) -> None:
        """A job that was stopped as a whole (Ctrl-Z, a debugger) and goes on has not waited in that time."""
        if late > _PAUSE and self._since:
            self._since += late

    def _look(self) -> Callable[[], None] | None:
        """One look at the store and at this rank: what there is to do about it, or None."""
        store = self._store
        store.count(f"beat/{self.world.rank}")
        if store.has("failed"):
            self._failed_at = self._failed_at or time.monotonic()
            now = self._since or time.monotonic() - self._failed_at > _GRACE
            return self._leave_after_failure if now else None
        if store.has("alarm"):
            return lambda: self._report(lines_of(self._trainer))
        if self._since and time.monotonic() - self._since > self._deadline:
            return self._report_hang
        if not self._keeps and not self.world.hosted and store.has("left/0"):  # the store goes with rank 0
            self._keeper_left = True
            store.set(f"free/{self.world.rank}", "")
        elif self.told_to_stop():
            return self._look_for_silent_ranks()
        return None

    def _look_for_silent_ranks(self) -> Callable[[], None] | None:
        """A rank that is told to stop while it waits for one that stands still would never come to its checkpoint."""
        if not self._since:
            self._still = None
        elif self._still is None or self._still[0] != self._number:
            self._still = (self._number, time.monotonic(), self._beats())
        elif time.monotonic() - self._still[1] > _AFTER_SIGNAL:
            before, now = self._still[2], self._beats()
            silent = [rank for rank, one, two in zip(self._others, before, now) if one == two]
            self._still = (self._number, time.monotonic(), now)
            return (lambda: self._give_up(silent)) if silent else None
        return None

    def _beats(self) -> list[str | None]:
        return [self._store.get(f"beat/{rank}") for rank in self._others]

    # The end of this process

    def _claim_end(self) -> bool:
        """Only one thread ends the process; the training thread waits if it is not the one."""
        if self._ending.acquire(blocking=False):
            self._ends = True
            return True
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=4 * _ANSWERS)
        return False

    def _sound(self, kind: str, reason: str) -> None:
        alarm = {"kind": kind, "reason": reason, "number": self._number, "operation": self._operation}
        self._store.set_first("alarm", json.dumps(alarm), _ANSWERS)

    def _report_hang(self) -> None:
        self._sound("hung", f"no progress for {self._deadline:g} s (run.deadline)")
        self._report(lines_of(self._trainer))

    def _report(self, lines: list[str]) -> None:
        """Everybody says where it stands; everybody prints it; everybody leaves."""
        store, ranks = self._store, range(self.world.size)
        store.set(f"where/{self.world.rank}", json.dumps(self._standing(lines)), _ANSWERS)
        store.wait_for([f"where/{rank}" for rank in ranks], _ANSWERS)
        where = {rank: json.loads(store.get(f"where/{rank}", _ANSWERS) or "null") for rank in ranks}
        absent = [rank for rank, said in where.items() if said is None or not said["waits"]]
        names = {rank: store.get(f"who/{rank}", _ANSWERS) for rank in absent}
        left = {rank for rank in absent if where[rank] is None and store.has(f"left/{rank}", within=_ANSWERS)}
        alarm = json.loads(store.get("alarm", _ANSWERS) or "{}")
        self._say_and_leave(describe(alarm, where, names, left))

    def _report_alone(self, error: StoreLost, lines: list[str]) -> None:
        """The store is gone, so nobody can be asked; but who kept it is known."""
        place = f"which keeps the meeting point at {self.world.master}:{self.world.port}"
        if self._keeper_left:
            text = f"{self._keeper} has ended, but this rank still waits for it"
        elif isinstance(error, StoreSilent):
            text = f"{self._keeper}, {place}, does not answer: {SILENT}"
        else:
            text = f"{self._keeper}, {place}, is gone: {KILLED}"
        self._say_and_leave(f"{text}\n  this rank is {standing(self._standing(lines))}\n{GONE_HELP}")

    def _standing(self, lines: list[str]) -> Standing:
        return {"number": self._number, "operation": self._operation, "waits": bool(self._since), "lines": lines}

    def _say_and_leave(self, text: str, code: int = HUNG) -> None:
        cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # a progress bar hides it
        sys.stderr.write(cursor + "".join(f"[rank {self.world.rank}] {line}\n" for line in text.splitlines()))
        self.before_leaving(text.splitlines()[0], text)
        self._leave(code)

    def _give_up(self, silent: list[int]) -> None:
        who = silent_ranks(silent, {rank: self._store.get(f"who/{rank}", _ANSWERS) for rank in silent})
        self._say_and_leave(f"told to stop, but {who}: ended in {self._operation}, without a checkpoint of it", 143)

    def _leave_after_failure(self) -> None:
        failure = json.loads(self._store.get("failed", _ANSWERS) or "{}")
        message = f"ended because rank {failure['rank']} failed"
        self.before_leaving(message, f"{message}:\n{failure['trace']}")
        self._leave(FAILED_ELSEWHERE)

    def _leave(self, code: int) -> None:
        """End the process from any thread: the training thread may be anywhere. Checkpoints are whole or not there."""
        threading.Thread(target=_end_soon, args=(code,), daemon=True).start()  # where a full pipe blocks what follows
        sys.stdout.flush()
        sys.stderr.flush()
        self._part()
        os._exit(code)

    def _part(self, last: bool = False) -> None:
        """Say that this rank needs the store no longer.

        The rank where the store lives waits until this is true of all; one that failed (`last`) has the last word.
        """
        others = [f"free/{rank}" for rank in self._others]
        with suppress(StoreLost):  # nobody left to tell
            if last and not self._keeps:  # before it says so itself: the store would go while it waits
                self._store.wait_for(others, _ANSWERS)
            self._store.set(f"free/{self.world.rank}", "", _ANSWERS)
            if self._keeps:
                self._store.wait_for(others, _ANSWERS)


def _end_soon(code: int) -> None:
    time.sleep(4 * _ANSWERS)
    os._exit(code)
