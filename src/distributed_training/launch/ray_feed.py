"""`dtrain feed --ray`: loader workers on the CPUs of a Ray cluster, spread over its nodes.

Every worker is an actor with a CPU of its own, which dials the GPU side itself: batches do not pass through here. The
first one is placed on the machine of the command, if that is a node with CPUs: checkpoints come home there. One that
is lost, with its node or alone, is placed anew wherever there is room; until then the others do its work.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from distributed_training.config import Config
from distributed_training.feed.loader import LoaderFigures, furthest
from distributed_training.feed.pairing import PairingLink
from distributed_training.feed.worker import Board
from distributed_training.launch.ray_cluster import check_room, nodes
from distributed_training.launch.ray_loader import Assignment, Ended, LoaderActor
from distributed_training.runtime.errors import FeedError
from distributed_training.split.screen import LoaderScreen

logger = logging.getLogger(__name__)

_LOOK = 0.5  # seconds
_ENDING = 5.0  # seconds that workers have to end by themselves when the run is over
_EARLY, _MOST_EARLY = 10.0, 5  # deaths within so many seconds of the start, so many times in a row, are no accident
_TEXT = 250  # characters
_PLACED = 30.0  # seconds after which it is said that some wait for room


@dataclass(eq=False)
class _Placed:
    """A worker as this process sees it."""

    number: int
    actor: Any
    ending: Any
    """What it says at its end; not here before."""
    asked: Any
    """Its figures, on their way."""
    started: float
    early: int
    board: Board | None = None
    """Its newest figures; None while it has no place, or loads the data."""


class RayFeed:
    """The loader workers of one command."""

    def __init__(self, ray: Any, config: Config, links: Sequence[PairingLink], loaders: int) -> None:
        """`ray`: the module, connected."""
        if loaders < len(links):
            raise FeedError(f"--loaders {loaders} for {len(links)} ranks; each rank needs at least one")
        check_room(ray, loaders, {"CPU": 1}, advice="ask for fewer with --loaders, or add nodes")
        self._home = _here(ray) if config.feed.checkpoints_home != "off" else None
        if self._home is None:
            config = config.replace(**{"feed.checkpoints_home": "off"})
        self._ray, self._config, self._links, self._loaders = ray, config, list(links), loaders
        self._actor = ray.remote(max_concurrency=2, max_restarts=0)(LoaderActor)
        self._workers: list[_Placed] = []
        self._gone = [0, 0, 0.0]  # batches, bytes and seconds of workers that are no more
        self._restarts = 0
        self._screen: LoaderScreen | None = None
        self._began, self._told = time.monotonic(), False

    def run(self) -> LoaderFigures:
        """Load until the training is over. Raises FeedError where the GPU side refuses, or is not there for long."""
        try:
            for number in range(self._loaders):
                self._workers.append(self._place(number))
            over = 0.0
            while self._workers:
                self._ray.wait([one.ending for one in self._workers], timeout=_LOOK)
                finished = [self._look_at(one) for one in list(self._workers)]
                self._ask()
                over = over or (time.monotonic() if any(finished) else 0.0)
                connected = any(one.board is not None and one.board.connected for one in self._workers)
                if over and (time.monotonic() > over + _ENDING or not connected):
                    break  # the rest is busy with a sample, has no place, or tries to reach a server that is gone
            return self.figures()
        finally:
            self.close()

    def figures(self) -> LoaderFigures:
        """What the workers did so far, as far as is known."""
        boards = [one.board for one in self._workers if one.board is not None]
        return LoaderFigures(
            workers=len(self._workers),
            connected=sum(board.connected > 0 for board in boards),
            batches=int(self._gone[0] + sum(board.batches for board in boards)),
            bytes=int(self._gone[1] + sum(board.bytes for board in boards)),
            loading=self._gone[2] + sum(board.loading for board in boards),
            restarts=self._restarts,
            **furthest(boards),
        )

    def close(self) -> None:
        """End all workers. Safe to call twice."""
        for one in self._workers:
            self._ray.kill(one.actor)
            self._count(one)
        self._workers = []
        if self._screen is not None:
            self._screen.close(self.figures())
            self._screen = None

    def _place(self, number: int, early: int = 0) -> _Placed:
        given = Assignment(
            self._config.to_dict(), list(map(str, self._links)), number, self._loaders, os.getcwd(), sys.path
        )
        options: dict[str, Any] = {"num_cpus": 1, "scheduling_strategy": "SPREAD"}
        if self._home is not None and number == 0:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(self._home, soft=False)
        actor = self._actor.options(**options).remote(given)
        return _Placed(number, actor, actor.run.remote(), actor.figures.remote(), time.monotonic(), early)

    def _look_at(self, one: _Placed) -> bool:
        """Place a worker anew if it was lost; whether it ended because the training is over."""
        done, _ = self._ray.wait([one.ending], timeout=0)
        if not done:
            return False
        self._workers.remove(one)
        self._count(one)
        try:
            ended: Ended = self._ray.get(one.ending)
        except self._ray.exceptions.RayError as error:
            self._lost(one, error)
            return False
        if ended.error:
            raise FeedError(f"loader worker {one.number} on {ended.node}: {ended.error}")
        return True

    def _lost(self, one: _Placed, error: Exception) -> None:
        with suppress(Exception):  # it may only be out of reach: there shall not be two of it
            self._ray.kill(one.actor)
        early = one.early + 1 if time.monotonic() - one.started < _EARLY else 0
        why = " ".join(str(error).split())[:_TEXT]
        if early > _MOST_EARLY:
            raise FeedError(f"loader worker {one.number} was lost soon after its start, {early} times in a row: {why}")
        logger.warning("loader worker %d is lost; placing it anew: %s", one.number, why)
        time.sleep(min(0.1 * 2**early, 2.0) if early else 0.0)
        self._restarts += 1
        self._workers.append(self._place(one.number, early))

    def _ask(self) -> None:
        """Take the figures that have come, ask for the next ones, and show them."""
        for one in self._workers:
            done, _ = self._ray.wait([one.asked], timeout=0)
            if not done:
                continue
            try:
                numbers, plan = self._ray.get(one.asked)
            except self._ray.exceptions.RayError:
                continue  # it is lost, which its end will say
            if plan is not None and numbers:
                one.board = Board(numbers)
                if self._screen is None:
                    self._screen = self._make_screen(*plan)
            one.asked = one.actor.figures.remote()
        if self._screen is not None:
            self._screen(self.figures())
        waiting = [one for one in self._workers if one.board is None]
        if waiting and not self._told and time.monotonic() > self._began + _PLACED:
            self._told = True
            logger.warning(
                "%d of %d loader workers have not begun: they wait for a free CPU of the cluster, or load the data",
                len(waiting),
                self._loaders,
            )

    def _make_screen(self, steps: int, batch: int) -> LoaderScreen:
        epochs = self._config.training.epochs
        return LoaderScreen(self._config.run.progress, steps, batch / len(self._links), self._loaders, epochs)

    def _count(self, one: _Placed) -> None:
        if one.board is not None:
            for at, value in enumerate((one.board.batches, one.board.bytes, one.board.loading)):
                self._gone[at] += value


def _here(ray: Any) -> str | None:
    """The node that this process is on; None where it is outside the cluster, or the node has no CPUs to give."""
    if ray.util.client.ray.is_connected():
        return None
    own = ray.get_runtime_context().get_node_id()
    return own if any(node.id == own and node.holds({"CPU": 1}) for node in nodes(ray)) else None
