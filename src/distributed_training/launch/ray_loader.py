"""A loader worker as a Ray actor: an ordinary worker of a feed, in a process that Ray has placed."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from distributed_training.config import Config
from distributed_training.runtime.errors import DistributedTrainingError


@dataclass(frozen=True)
class Assignment:
    """What one worker is to do."""

    config: dict[str, Any]
    """All settings, as `Config.to_dict` gives them."""
    links: list[str]
    """Of the GPU side; several are the ranks of a job, which the workers share."""
    number: int
    workers: int
    """How many there are in all."""
    folder: str
    """Working directory of the command: modules of the user's and relative paths are looked for there."""
    path: list[str]
    """Where modules are looked for."""


@dataclass(frozen=True)
class Ended:
    """How a worker has ended, other than by death."""

    error: str = ""
    """Why it failed; empty where the training is over."""
    node: str = ""


class LoaderActor:
    """One worker. `run` takes as long as the training; `figures` may be asked meanwhile."""

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment
        self._plan: tuple[int, int] | None = None
        self._numbers: list[float] = []

    def figures(self) -> tuple[list[float], tuple[int, int] | None]:
        """(the worker's board, (steps of an epoch, samples of a step) once that is known)."""
        return list(self._numbers), self._plan

    def run(self) -> Ended:
        """Load until the training is over."""
        given = self._assignment
        with suppress(OSError):  # another machine may have no such folder, and needs none where paths are absolute
            os.chdir(given.folder)
        sys.path.extend(place for place in given.path if place not in sys.path)
        try:
            self._work(given)
            return Ended()
        except DistributedTrainingError as error:
            return Ended(str(error), socket.gethostname())

    def _work(self, given: Assignment) -> None:
        import torch

        from distributed_training.data.loading_process import only_loads
        from distributed_training.feed.loader import SWITCH
        from distributed_training.feed.pairing import PairingLink
        from distributed_training.feed.worker import Board, Worker
        from distributed_training.runtime.allocator import keep_freed_memory
        from distributed_training.split.feeding import feeding_from
        from distributed_training.split.homecoming import home_for

        torch.set_num_threads(1)
        keep_freed_memory()
        only_loads()
        sys.setswitchinterval(SWITCH)
        config = Config.from_dict(given.config, "dtrain feed")
        links = [PairingLink.parse(link) for link in given.links]
        feeding = feeding_from(config, len(links))
        feeding.workers = given.workers
        self._numbers = [0.0] * len(Board.FIELDS)
        self._plan = (feeding.train.plan.steps_per_epoch, feeding.train.plan.batch_size)
        loader = feeding.loader(links, config, home_for(config, feeding.train))
        link = links[given.number % len(links)]
        Worker(loader.work, link, Board(self._numbers), receives=given.number == 0).run()
