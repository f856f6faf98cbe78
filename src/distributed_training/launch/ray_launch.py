"""A job on a Ray cluster, through Ray Train: `dtrain launch --ray --workers 8 -- train config.yaml strategy=ddp`.

Ray Train places the workers, notices those that are gone, and starts all again, in another number where that is
allowed. On each worker runs one rank (`launch/ray_rank.py`): the same program, with the same variables, as under every
other launcher. Started again, the ranks find their job's run directory and go on from its newest good checkpoint; since
the plan of samples knows no ranks, the training is the same on any number of them.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from distributed_training.config.errors import ConfigError
from distributed_training.launch.ray_account import Account
from distributed_training.launch.ray_address import through_client
from distributed_training.launch.ray_checks import Wanted, check_nodes
from distributed_training.launch.ray_cluster import DEADLINE, amounts, check_room, connected, nodes
from distributed_training.launch.ray_desk import open_desk
from distributed_training.launch.ray_rank import SAVING, Task
from distributed_training.launch.report import Outcome
from distributed_training.launch.ssh import forwarded
from distributed_training.runtime.errors import RanksError
from distributed_training.runtime.imports import require
from distributed_training.runtime.signals import ENDING, handled_by

PLACEMENTS = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_LOST = 3  # restarts after lost nodes, where the user has named no number
_PLACED = 300.0  # seconds in which Ray must have placed the workers
_ECHO = 2.0  # seconds in which a second signal is the same wish
_INTERVAL = 0.1  # seconds
_OF_RAY = ("CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "MASTER_PORT")  # each node has its own


@dataclass(frozen=True)
class Workers:
    """How many workers, and what each takes."""

    count: int
    fewest: int | None = None
    """With how many it may begin and go on; None: with all only."""
    cpus: float = 1.0
    gpus: float | None = None
    """None: one each, if the cluster has so many."""
    placement: str = "PACK"
    """One of PLACEMENTS."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"--workers {self.count}: at least one")
        if self.fewest is not None and not 1 <= self.fewest <= self.count:
            raise ConfigError(f"--min-workers {self.fewest}: from 1 to {self.count}, the number of --workers")
        if self.cpus < 0 or (self.gpus or 0) < 0:
            raise ConfigError("--cpus-per-worker and --gpus-per-worker: a number from 0 on")
        if self.gpus is not None and self.gpus > 1 and self.gpus != int(self.gpus):
            raise ConfigError(f"--gpus-per-worker {self.gpus:g}: a whole number, or a part of one GPU")
        if self.placement not in PLACEMENTS:
            raise ConfigError(f"--placement {self.placement}: one of {', '.join(PLACEMENTS)}")


@dataclass(frozen=True)
class Job:
    """What runs on the cluster."""

    program: list[str]
    """Arguments of Python: `-m module ...` or `script.py ...`."""
    workers: Workers
    address: str | None = None
    """Of the cluster: see `ray_cluster.connected`."""
    restarts: int | None = None
    """How often all start again after a failure; None: three times, and only where nodes were lost."""
    deadline: float | None = None
    """Longest wait in seconds for the cluster, for its workers, and of the ranks for each other."""
    nodes_within: float = 0.0
    """Seconds in which nodes that are not there yet may come."""
    more_variables: Sequence[str] = ()
    """Names of variables that the ranks get beside the usual ones."""
    files: Sequence[Path] = ()
    """Files that every node must have: a config, a script."""
    root: Path | None = None
    """Where the run directory goes; None: not known."""
    directory: Path = field(default_factory=Path.cwd)
    """Working directory of the ranks."""


def run(job: Job) -> Outcome:
    """Run the job to its end, with what the ranks write on this screen."""
    if client := through_client(job.address):
        raise ConfigError(
            f"--address {client}: a training is launched on a machine of its cluster, whose storage it shares; start "
            "it there, or send it there with `ray job submit -- dtrain launch --ray ...` (docs/ray.md)"
        )
    variables = {name: value for name, value in forwarded(job.more_variables).items() if name not in _OF_RAY}
    if job.deadline is not None:
        variables["DTRAIN_RUN__DEADLINE"] = str(job.deadline)
    with connected(job.address, job.deadline or DEADLINE) as ray:
        bundle = _bundle(ray, job.workers)
        _check(ray, job, bundle)
        task = Task(job.program, str(job.directory), uuid.uuid4().hex, variables)
        with tempfile.TemporaryDirectory(prefix="dtrain-ray-") as folder:
            return _Following(ray, job, task, bundle, folder).run()


def _bundle(ray: Any, workers: Workers) -> dict[str, float]:
    """What each worker takes."""
    gpus = workers.gpus
    if gpus is None:
        there = sum(node.holds({"CPU": workers.cpus, "GPU": 1}) for node in nodes(ray))
        gpus = 1.0 if there >= (workers.fewest or workers.count) else 0.0
    return {name: size for name, size in (("CPU", workers.cpus), ("GPU", gpus)) if size > 0}


def _check(ray: Any, job: Job, bundle: dict[str, float]) -> None:
    workers = job.workers
    check_room(
        ray,
        workers.fewest or workers.count,
        bundle,
        each_on_its_own=workers.placement == "STRICT_SPREAD",
        together=workers.placement == "STRICT_PACK",
        wait=job.nodes_within,
        advice="ask for fewer (--workers, --min-workers) or smaller ones (--cpus-per-worker, --gpus-per-worker), add "
        "nodes, or give them time to come with --nodes-within SECONDS",
    )
    able = [node for node in nodes(ray) if node.holds(bundle)]
    check_nodes(ray, able, Wanted(job.directory, job.files, job.root))


class _Following:
    """Ray Train runs in a thread of its own; the main thread shows what the ranks say and takes signals."""

    def __init__(self, ray: Any, job: Job, task: Task, bundle: dict[str, float], folder: str) -> None:
        require("ray.train", "ray", "dtrain launch --ray")
        from distributed_training.launch.ray_train import make_trainer

        self._ray, self._job, self._bundle = ray, job, bundle
        self._desk = open_desk()
        self._account = Account(self._desk, again=self._say_restart)
        self._restarts = 0
        self._allowed = _LOST if job.restarts is None else job.restarts
        self._error: BaseException | None = None
        self._trainer = make_trainer(job, task, bundle, self._desk, self._allowed, folder)
        self._thread = threading.Thread(target=self._fit, name="ray-train", daemon=True)

    def run(self) -> Outcome:
        patience = max(self._job.deadline or _PLACED, DEADLINE) + self._job.nodes_within
        wish, wished_at = None, 0.0
        with _wishes() as wishes:
            idle = time.monotonic()
            self._thread.start()
            while self._thread.is_alive():
                self._account.read()
                now = time.monotonic()
                idle = now if self._account.running else idle
                if wishes and wish is None:
                    wish, wished_at = wishes[0], now
                    self._ray.get(self._desk.order.remote(wish.name), timeout=30)
                if wish is not None and self._hopeless(len(wishes), now - wished_at):
                    break
                if wish is None and now - idle > patience:
                    raise self._not_placed(patience)
                self._thread.join(_INTERVAL)
            self._account.read_to_the_end()
        return self._outcome(wish)

    def _fit(self) -> None:
        try:
            self._trainer.fit()
        except BaseException as error:  # told to the main thread, which knows more
            self._error = error

    def _hopeless(self, signals: int, waited: float) -> bool:
        """Whether nothing is to be waited for any more: a second Ctrl-C, nobody there, no end in time."""
        return signals > 1 or waited > SAVING + 15 or (waited > _ECHO and not self._account.running)

    def _say_restart(self, before: int) -> None:
        account = self._account
        if account.was_told(before):
            text = f"{account.size} workers after {account.size_of(before)}: all ranks start again"
        else:
            self._restarts += 1
            text = f"restart {self._restarts} of {self._allowed}: all ranks start again"
            if account.size != account.size_of(before):
                text += f", on {account.size} workers"
            if report := account.outcome(before).report:
                text = f"{report}\n{text}"
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

    def _outcome(self, wish: signal.Signals | None) -> Outcome:
        account = self._account
        if account.finished:
            return Outcome(0)
        outcome = account.outcome() if account.newest >= 0 else Outcome(0)
        if wish is not None:
            return Outcome(128 + wish, "" if account.was_told(account.newest) else outcome.report)
        if outcome.code:
            return outcome
        reason = " ".join(str(self._error or "the workers ended without a word").split())
        raise RanksError(f"Ray Train could not run the workers: {reason[:600]}")

    def _not_placed(self, waited: float) -> RanksError:
        workers = self._job.workers
        return RanksError(
            f"for {waited:g} s the Ray cluster had no room for {workers.fewest or workers.count} workers of "
            f"{amounts(self._bundle)} each (`ray status` shows who uses it); ask for fewer, or raise --deadline"
        )


@contextmanager
def _wishes() -> Iterator[list[signal.Signals]]:
    """Ctrl-C, SIGTERM and hang-up as wishes; one right after another is the same."""
    wishes: list[signal.Signals] = []
    last = [0.0]

    def note(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not wishes or now - last[0] > _ECHO:
            wishes.append(signal.SIGTERM if number == signal.SIGHUP else signal.Signals(number))
        last[0] = now

    if threading.current_thread() is not threading.main_thread():  # Python allows handlers nowhere else
        yield wishes
        return
    with handled_by(note, ENDING):
        yield wishes
