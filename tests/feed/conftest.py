"""Real loaders for the tests of the feed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.feed.runs import Pack
from tests.launching import ROOT, environment

from distributed_training.feed import FeedServer
from distributed_training.feed.homecoming.parcels import Parcel


class LoaderProcess:
    """A loader that was started."""

    def __init__(self, pid: int, log: Path) -> None:
        self.pid, self._log = pid, log

    @property
    def log(self) -> str:
        """What it said."""
        return self._log.read_text(encoding="utf-8") if self._log.exists() else ""

    def workers(self, count: int) -> list[int]:
        """Process ids of its workers, once there are so many."""
        for _ in until(20):
            with suppress(psutil.NoSuchProcess):
                pids = [child.pid for child in psutil.Process(self.pid).children()]
                if len(pids) >= count:
                    return pids
        raise AssertionError(f"no {count} workers: {self.log}")

    def alive(self) -> bool:
        """Whether it still runs."""
        try:
            return psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def wait(self, seconds: float = 20) -> str:
        """Its log, once it has ended by itself."""
        for _ in until(seconds):
            if not self.alive():
                return self.log
        raise AssertionError(f"the loader still runs: {self.log}")

    def kill(self) -> None:
        """End it at once, and its workers with it."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def until(seconds: float) -> Iterator[None]:
    """Turns of a loop that waits for something."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield
        time.sleep(0.01)


def connected(server: FeedServer, count: int, seconds: float = 20) -> None:
    """Wait until so many workers are connected."""
    for _ in until(seconds):
        if server.figures().loaders == count:
            return
    raise AssertionError(f"{server.figures().loaders} of {count} workers are connected")


StartLoader = Callable[..., LoaderProcess]


class Nursery:
    """The process that starts loaders. To be closed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.feed.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment(),
        )

    def start(
        self,
        log: Path,
        link: Any,
        dataset: str = "arrays",
        *,
        workers: int = 1,
        batch_size: int = 16,
        namespace: str | None = None,
        home: Path | None = None,
        spare_cores: int | None = None,
        aside: bool = False,
        **settings: Any,
    ) -> LoaderProcess:
        """Start a loader, in a network namespace if one is named; below `home` it keeps a copy of the run.

        `spare_cores`: from so many cores on other threads may help the one that loads. `aside`: frames are sent so,
        whatever is quicker.
        """
        order = {"dataset": dataset, "batch_size": batch_size, "workers": workers, "settings": settings}
        order |= {} if spare_cores is None else {"spare_cores": spare_cores}
        order |= {"aside": True} if aside else {}
        order |= {"link": [str(one) for one in link] if isinstance(link, list) else str(link), "log": str(log)}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({**order, "namespace": namespace, "home": str(home or "")}) + "\n")
        self._process.stdin.flush()
        return LoaderProcess(int(self._process.stdout.readline()), log)

    def close(self) -> None:
        """End it; the loaders go on."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(20)
        self._process.stdout.close()


@pytest.fixture(scope="module")
def _nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture
def start_loader(_nursery: Nursery, tmp_path: Path) -> Iterator[StartLoader]:
    """Start a loader; all are ended after the test."""
    started: list[LoaderProcess] = []

    def start(link: Any, dataset: str = "arrays", **options: Any) -> LoaderProcess:
        started.append(_nursery.start(tmp_path / f"loader{len(started)}.log", link, dataset, **options))
        return started[-1]

    yield start
    for loader in started:
        loader.kill()
    for loader in started:
        loader.wait()


@pytest.fixture
def closed() -> Iterator[Pack]:
    """Files that are closed after the test."""
    with ExitStack() as files:

        def closed(parcels: list[Parcel]) -> list[Parcel]:
            for parcel in parcels:
                files.callback(parcel.close)
            return parcels

        yield closed
