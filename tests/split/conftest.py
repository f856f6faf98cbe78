"""Both sides of a split as real processes, forked from one that has torch imported."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.forked_ranks import RankServer
from tests.launching import free_port
from torch import Tensor

from distributed_training.checkpoint import find_checkpoint, read_state
from distributed_training.config import load_config
from distributed_training.training.job import build_job

SIDE = str(Path(__file__).parent / "side.py")


class Side:
    """A process of a test."""

    def __init__(self, pid: int, screen: Path) -> None:
        self.pid, self._screen = pid, screen

    @property
    def screen(self) -> str:
        """What it said so far."""
        return self._screen.read_text(encoding="utf-8") if self._screen.exists() else ""

    def until(self, text: str, seconds: float = 150) -> None:
        """Wait until it says something."""
        wait_for(lambda: text in self.screen, lambda: f"{text!r} did not come: {self.screen[-3000:]}", seconds)

    def end(self, seconds: float = 150) -> str:
        """What it said, once it has ended."""
        wait_for(lambda: not self.alive, lambda: f"it still runs: {self.screen[-3000:]}", seconds)
        return self.screen

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        try:
            return psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)


def wait_for(true: Callable[[], Any], why: Callable[[], str], seconds: float = 150) -> None:
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, why()
        time.sleep(0.01)


Start = Callable[..., list[Side]]


@pytest.fixture
def start(rank_server: RankServer, in_tmp: Path) -> Iterator[Start]:
    """Start processes: each is the words of `dtrain`, or a script and its arguments. All are ended after the test."""
    started: list[Side] = []

    def start(*commands: list[str], ranks: int = 0, port: int = 0) -> list[Side]:
        """The first `ranks` commands are the ranks of one job that meets at `port`."""
        environments = []
        for number, words in enumerate(commands):
            own = {"WORDS": json.dumps(words), "SCREEN": str(in_tmp / f"screen-{len(started) + number}")}
            own |= {"PWD": str(in_tmp), "COLUMNS": "200"}
            if number < ranks:
                own |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(ranks)}
                own |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            environments.append(own)
        job = rank_server.start_all(environments, [SIDE], in_tmp / "errors")
        sides = [Side(pid, Path(own["SCREEN"])) for pid, own in zip(job.pids, environments)]
        started.extend(sides)
        return sides

    yield start
    for side in started:
        with suppress(ProcessLookupError):
            side.signal(signal.SIGKILL)
    for side in started:
        side.end()


SLOW_AT_WILL = """import os, time


def slowly(sample):
    if os.path.exists("slow"):
        time.sleep(0.002)
    return sample
"""


@contextmanager
def slow_loading() -> Iterator[str]:
    """A setting with which samples take long until the block ends: a training that is not over before it is killed."""
    Path("slow_at_will.py").write_text(SLOW_AT_WILL)
    Path("slow").touch()
    yield "data.preprocess=slow_at_will:slowly"
    Path("slow").unlink()


def free_neighbours() -> int:
    """A port that is free, as is the one after it: ranks of a machine listen at neighbours."""
    while True:
        port = free_port()
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port + 1))
            return port


def weights_of(run: str | Path) -> dict[str, Tensor]:
    """The weights of a run's newest checkpoint."""
    return dict(read_state(find_checkpoint(Path(run)).path)["model"])


def train_here(*words: str) -> dict[str, float]:
    """Train in this process with data of this machine: the metrics."""
    with build_job(load_config(None, ["run.progress=off", *words])) as job:
        return job.train().metrics


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float = 0.0) -> None:
    """Bit for bit, or nearly so."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        if tolerance:
            torch.testing.assert_close(tensor, other[name], rtol=tolerance, atol=tolerance, msg=name)
        else:
            assert torch.equal(tensor, other[name]), name
