"""The CPU side: starts workers, watches over them, starts those that die again, and ends when the run is over."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

import torch

from distributed_training.data.base import Dataset
from distributed_training.data.loading_process import only_loads
from distributed_training.data.plan import Plan
from distributed_training.feed.answering import HomeDoor
from distributed_training.feed.course import Course, Part
from distributed_training.feed.homecoming.home import Home
from distributed_training.feed.pairing import PairingLink
from distributed_training.feed.settings import LoaderSettings
from distributed_training.feed.worker import Board, Work, Worker
from distributed_training.runtime.allocator import keep_freed_memory
from distributed_training.runtime.errors import DistributedTrainingError, FeedError
from distributed_training.runtime.forking import garbage_stays_here
from distributed_training.runtime.signals import end_with_parent
from distributed_training.wire.fields import Fact

logger = logging.getLogger(__name__)

_BEGINS = 20.0  # seconds that a new process has to begin
_LOOK = 0.5
_ENDING = 5.0  # seconds that workers have to end by themselves when the run is over
_EARLY, _MOST_EARLY = 5.0, 5  # deaths within so many seconds of the start, so many times in a row, are no accident
_FINAL = 9  # exit code: another attempt would end the same way
_TEXT = 4000
SWITCH = 0.0005
"""Seconds that loading may keep Python from sending."""


@dataclass(frozen=True)
class LoaderFigures:
    """What the workers of a loader have done so far."""

    workers: int
    connected: int
    batches: int
    bytes: int
    loading: float
    """Seconds of all workers together that went into loading."""
    restarts: int
    epoch: int = 0
    step: int = 0
    """Where training was when it was last heard of."""
    queue: int = 0
    """Steps that were ready there."""
    waited: float = 0.0
    """Part of the time that it has waited for batches."""
    loaders: int = 0
    """Workers of all loaders that were connected to it."""


@dataclass
class _Process:
    """A worker process as its parent sees it."""

    number: int
    link: PairingLink | HomeDoor
    board: Board
    process: Any
    errors: int
    """The end of a pipe where it says why it failed."""
    started: float
    early: int = 0


class Loader:
    """Batches of a dataset for a GPU side elsewhere. Several links are the ranks of a job, which share the workers.

    In place of links, a `HomeDoor`: the GPU side dials, and the workers await it there. The caller closes that.

    With `validation` it also brings held-out samples after the training steps of every epoch. `facts` are told to the
    GPU side along with the plan: the number of epochs, for one, where that side has no config of its own.
    """

    def __init__(
        self,
        dataset: Dataset,
        plan: Plan,
        link: str | PairingLink | HomeDoor | Sequence[str | PairingLink],
        *,
        workers: int = 1,
        settings: LoaderSettings | None = None,
        on_figures: Callable[[LoaderFigures], None] | None = None,
        validation: tuple[Dataset, Plan] | None = None,
        facts: Mapping[str, Fact] | None = None,
        home: Home | None = None,
    ) -> None:
        """`home` is where a copy of the run is kept; the first worker writes it."""
        links: list[str | PairingLink | HomeDoor]
        links = [link] if isinstance(link, (str, PairingLink, HomeDoor)) else list(link)
        if workers < len(links):
            raise FeedError(f"{workers} loader workers for {len(links)} ranks; each rank needs at least one")
        held_out = Part(*validation) if validation is not None else None
        told = {"workers": workers} if isinstance(link, HomeDoor) else {}  # so many connections are to be dialled
        course = Course(Part(dataset, plan), held_out, {**(facts or {}), **told})
        self.work = Work(course, dataset.fingerprint(), course.all_facts(), settings or LoaderSettings(), home)
        """What its workers have in common, wherever they run."""
        self._links = [PairingLink.parse(one) if isinstance(one, str) else one for one in links]
        self._workers, self._on_figures = workers, on_figures
        self._processes: list[_Process] = []
        self._context = multiprocessing.get_context("fork")
        self._gone = [0, 0, 0.0]  # batches, bytes and seconds of processes that are no more
        self._restarts = 0

    def run(self) -> LoaderFigures:
        """Load until the run is over. Raises FeedError where the GPU side refuses, or is not there for too long."""
        try:
            for number in range(self._workers):
                self._processes.append(self._start(number))
            finished, over = 0, 0.0
            while self._processes:
                wait([one.process.sentinel for one in self._processes], _LOOK)
                for one in list(self._processes):
                    finished += self._look_at(one)
                if self._on_figures is not None:
                    self._on_figures(self.figures())
                over = over or (time.monotonic() if finished else 0.0)
                if over and (
                    time.monotonic() > over + _ENDING or not any(one.board.connected for one in self._processes)
                ):
                    break  # the run is over; the rest is busy with a sample, or tries to reach a server that is gone
            return self.figures()
        finally:
            self.close()

    def figures(self) -> LoaderFigures:
        """What the workers did so far."""
        boards = [one.board for one in self._processes]
        return LoaderFigures(
            workers=len(boards),
            connected=sum(board.connected > 0 for board in boards),
            batches=int(self._gone[0] + sum(board.batches for board in boards)),
            bytes=int(self._gone[1] + sum(board.bytes for board in boards)),
            loading=self._gone[2] + sum(board.loading for board in boards),
            restarts=self._restarts,
            **furthest(boards),
        )

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [one.process.pid for one in self._processes]

    def close(self) -> None:
        """End all workers. Safe to call twice."""
        for one in self._processes:
            if one.process.is_alive():
                one.process.terminate()
        for one in self._processes:
            one.process.join(5.0)
            if one.process.is_alive():
                one.process.kill()
                one.process.join(5.0)
            self._count(one)
            os.close(one.errors)
        self._processes = []

    def _start(self, number: int, early: int = 0) -> _Process:
        link = self._links[number % len(self._links)]
        board = Board(self._context.RawArray("d", len(Board.FIELDS)))
        reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        process = self._context.Process(
            target=_main,
            args=(self.work, link, board, writing, os.getpid(), number),
            name=f"dtrain feed worker {number}",
        )
        with garbage_stays_here():
            process.start()
        os.close(writing)
        return _Process(number, link, board, process, reading, time.monotonic(), early)

    def _look_at(self, one: _Process) -> int:
        """Start a worker again if it died; 1 where it ended because the run is over."""
        lived = time.monotonic() - one.started
        if one.process.is_alive():
            if one.board.begun or lived < _BEGINS:
                return 0
            # In a process with threads a fork can come up dead, up to Python 3.11.
            one.process.kill()
            one.process.join()
        code = one.process.exitcode
        text = _read(one.errors)
        self._processes.remove(one)
        self._count(one)
        os.close(one.errors)
        if code == 0:
            return 1
        early = one.early + 1 if lived < _EARLY else 0
        if code == _FINAL or early > _MOST_EARLY:
            raise FeedError(
                text or f"loader workers die at once (the last by {_death(code)}); see their messages above"
            )
        logger.warning(
            "loader worker %d ended by %s; starting it again%s", one.number, _death(code), f": {text}" if text else ""
        )
        time.sleep(min(0.1 * 2**early, 2.0) if early else 0.0)
        self._restarts += 1
        self._processes.append(self._start(one.number, early))
        return 0

    def _count(self, one: _Process) -> None:
        for at, value in enumerate((one.board.batches, one.board.bytes, one.board.loading)):
            self._gone[at] += value


def furthest(boards: Sequence[Board]) -> dict[str, Any]:
    """What the worker knows of training that has heard of it last."""
    board = max(boards, key=lambda board: (board.epoch, board.step), default=None)
    if board is None:
        return {}
    whole = {name: int(getattr(board, name)) for name in ("epoch", "step", "queue", "loaders")}
    return {**whole, "waited": board.waited / 1000}


def _death(code: int | None) -> str:
    if code is not None and code < 0:
        return signal.Signals(-code).name
    return f"exit code {code}"


def _read(end: int) -> str:
    try:
        return os.read(end, 65536).decode(errors="replace")
    except BlockingIOError:
        return ""


def _main(work: Work, link: PairingLink | HomeDoor, board: Board, errors: int, parent: int, number: int) -> None:
    """The worker process."""
    end_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    # Ctrl-C reaches every process of the terminal; the parent decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    board.set("begun", 1.0)
    torch.set_num_threads(1)
    keep_freed_memory()
    only_loads()
    sys.setswitchinterval(SWITCH)
    try:
        Worker(work, link, board, receives=number == 0).run()
    except DistributedTrainingError as error:
        os.write(errors, str(error)[:_TEXT].encode())
        sys.exit(_FINAL if isinstance(error, FeedError) else error.exit_code)
