"""The loader processes of the service: made, watched, made anew."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from distributed_training.tuning.shared_feed.messages import encode
from distributed_training.tuning.shared_feed.worker import Stock, start_worker

logger = logging.getLogger(__name__)

_BEGINS = 20.0  # seconds that a new process has to begin
_MANY_ROWS = 1 << 30
_ENDING = 5.0  # seconds
_SLOWLY = 1.0  # seconds between two new processes, once one has died


@dataclass(frozen=True)
class Task:
    """Samples that one worker loads."""

    part: str
    key: int
    ids: np.ndarray
    slots: np.ndarray


@dataclass(eq=False)
class Hand:
    """A worker as the service sees it."""

    pid: int
    tasks: socket.socket
    since: float
    """When it was started, or got its task."""
    begun: bool = False
    gone: bool = False
    task: Task | None = None


class Workers:
    """So many loader processes. Deaths do not matter: whatever one was to load, another loads."""

    def __init__(self, stocks: Mapping[str, Stock], count: int, deadline: float) -> None:
        """`deadline`: seconds that a task may take."""
        self.count = count
        self._stocks, self._deadline = stocks, deadline
        self._hands: list[Hand] = []
        self._careful, self._not_before = 0, 0.0

    def keep(self, sockets: list[socket.socket]) -> tuple[list[Hand], list[Hand]]:
        """(those that are gone, those that are new). `sockets` are not for new ones."""
        now = time.monotonic()
        for hand in self._hands:
            limit = _BEGINS if not hand.begun else self._deadline if hand.task is not None else None
            if limit is not None and now - hand.since > limit:
                what = "did not begin" if not hand.begun else f"was busy with one task for {limit:g} s"
                logger.warning("a worker of the shared feed %s; starting another", what)
                with suppress(ProcessLookupError):
                    os.kill(hand.pid, signal.SIGKILL)
                hand.gone = True
        lost = [hand for hand in self._hands if hand.gone or _ended(hand.pid)]
        self._hands = [hand for hand in self._hands if hand not in lost]
        for hand in lost:
            with suppress(ChildProcessError):
                os.waitpid(hand.pid, 0)
            logger.warning("worker %d of the shared feed has ended; what it had to load is loaded again", hand.pid)
            self._not_before = now + _SLOWLY if now < self._not_before + _SLOWLY else now
        made = []
        while len(self._hands) < self.count and now >= self._not_before:
            own = [*sockets, *[hand.tasks for hand in self._hands], *[hand.tasks for hand in lost]]
            pid, tasks = start_worker(self._stocks, own)
            made.append(Hand(pid, tasks, time.monotonic()))
            self._hands.append(made[-1])
        return lost, made

    def idle(self) -> list[Hand]:
        """Those that have nothing to do."""
        return [hand for hand in self._hands if hand.begun and not hand.gone and hand.task is None]

    def give(self, hand: Hand, task: Task) -> None:
        """Have a worker load something."""
        hand.task, hand.since = task, time.monotonic()
        message = {"part": task.part, "key": task.key, "ids": task.ids.tobytes(), "slots": task.slots.tobytes()}
        try:
            hand.tasks.send(encode(message))
        except OSError:
            hand.gone = True

    def careful(self, task: Task) -> None:
        """A task was not finished: for a while samples are loaded one by one, to find the one that is to blame."""
        self._careful = 2 * len(task.ids) if len(task.ids) > 1 else self._careful

    def rows_at_once(self) -> int:
        """How many samples a task may have."""
        if self._careful:
            self._careful -= 1
            return 1
        return _MANY_ROWS

    def close(self) -> None:
        """End all."""
        for hand in self._hands:
            hand.tasks.close()  # which tells it to end
        end = time.monotonic() + _ENDING
        for hand in self._hands:
            while not _ended(hand.pid) and time.monotonic() < end:
                time.sleep(0.01)
            if not _ended(hand.pid):
                with suppress(ProcessLookupError):
                    os.kill(hand.pid, signal.SIGKILL)
                with suppress(ChildProcessError):
                    os.waitpid(hand.pid, 0)
        self._hands = []


def _ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True
