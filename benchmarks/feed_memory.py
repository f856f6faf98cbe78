"""Does a feed's memory stay under its bound? `python benchmarks/feed_memory.py --batches 36000`

That is an hour of 10 batches a second, of 1 MiB each, as fast as they come: from two loader workers to a consumer that
does nothing with them, whatever the speeds: loaders that are faster, a consumer that is faster, and both by turns; over
sockets and through shared memory. Looked at all the time: what the GPU side holds or has promised to take, what its
buffers take, and the resident memory of all processes. A run fails if a bound is passed, or if memory still grows in
the second half of it.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.feed.conftest import LoaderProcess, Nursery
from tests.feed.datasets import make_dataset, make_plan

from distributed_training.feed import FeedServer, FeedSettings

MEBI = 1 << 20
BATCH = 16  # samples; of the dataset "large" they take 1 MiB
OVERHEAD = 32 * MEBI
"""What a process may take beside batches: Python, sockets, what the C library keeps of what was freed."""
PATTERNS = ("loaders faster", "consumer faster", "by turns")
_LOOK = 0.1  # seconds between two looks at the processes


@dataclass
class Outcome:
    """What one run took, in bytes, at most."""

    pattern: str
    shared: bool
    batches: int
    memory: int
    """The bound."""
    held: int = 0
    """Batches that were there or might have come at any moment."""
    buffers: int = 0
    """Buffers in use."""
    growth: dict[str, int] = field(default_factory=dict)
    """Resident memory of each side's process beyond what it was at the start."""
    late_growth: dict[str, int] = field(default_factory=dict)
    """How much of that came in the second half."""
    seconds: float = 0.0

    @property
    def problem(self) -> str:
        """Which bound was passed; empty if none."""
        for what, size in (("held", self.held), ("buffers in use", self.buffers)):
            if size > self.memory:
                return f"{what}: {size / MEBI:.1f} MiB, more than {self.memory / MEBI:.1f}"
        for side, size in self.growth.items():
            # Buffers in use, and as many that are kept for use.
            if size > 2 * self.memory + OVERHEAD:
                return f"{side} grew by {size / MEBI:.1f} MiB"
            if self.late_growth[side] > OVERHEAD / 4:
                return f"{side} still grew by {self.late_growth[side] / MEBI:.1f} MiB in the second half"
        return ""


def run(
    pattern: str, shared: bool, batches: int, memory: int, start: Callable[..., LoaderProcess], dataset: str = "large"
) -> Outcome:
    """Take so many batches; `start` starts a loader process."""
    data, outcome = make_dataset(dataset), Outcome(pattern, shared, batches, memory)
    plan = make_plan(data, BATCH)
    settings = FeedSettings(memory=memory, deadline=60.0, absence=60.0)
    began = time.monotonic()
    with FeedServer(plan, dataset=data.fingerprint(), epochs=1 << 20, settings=settings) as server:
        loader = start(server.link(), dataset, workers=2, batch_size=BATCH, shared_memory=shared, memory=memory)
        workers = {f"worker {number}": pid for number, pid in enumerate(loader.workers(2))}
        watch, taken = _Watch(outcome, {"consumer": os.getpid(), **workers}), 0
        with _stopping(loader, pattern):
            for _ in _batches(server, batches):
                taken += 1
                if taken == batches // 2:
                    watch.halfway()
                outcome.held = max(outcome.held, server.hub.memory_held)
                outcome.buffers = max(outcome.buffers, server.pool.used_bytes)
                _pause(pattern, taken)
        watch.end()
        loader.kill()
    outcome.seconds = time.monotonic() - began
    return outcome


def _batches(server: FeedServer, count: int) -> Iterator[Any]:
    source, epoch = server.source(), 0
    while count > 0:
        for _, batch in source.batches(epoch):
            yield batch
            count -= 1
            if not count:
                return
        epoch += 1


def _pause(pattern: str, taken: int) -> None:
    """What a consumer that is slower does."""
    if pattern == "loaders faster" and taken % 8 == 0:
        time.sleep(0.004)
    elif pattern == "by turns" and taken % 512 == 0:
        time.sleep(0.1)


@contextmanager
def _stopping(loader: LoaderProcess, pattern: str) -> Iterator[None]:
    """Loaders that stand still for a moment, again and again."""
    if pattern == "loaders faster":
        yield
        return
    ended = threading.Event()
    still, works = (0.03, 0.03) if pattern == "consumer faster" else (0.1, 0.3)

    def stop() -> None:
        pids = loader.workers(2)
        while not ended.wait(works):
            _signal(pids, signal.SIGSTOP)
            ended.wait(still)
            _signal(pids, signal.SIGCONT)

    thread = threading.Thread(target=stop)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


class _Watch:
    """Looks at the resident memory of processes from a thread of its own."""

    def __init__(self, outcome: Outcome, pids: dict[str, int]) -> None:
        self._outcome, self._pids = outcome, pids
        self._start = {name: _resident(pid) for name, pid in pids.items()}
        self._most = dict(self._start)
        self._half: dict[str, int] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def halfway(self) -> None:
        """What it takes now is what it should take in the end."""
        self._half = dict(self._most)

    def end(self) -> None:
        """Write down what was seen."""
        self._ended.set()
        self._thread.join()
        for name, most in self._most.items():
            self._outcome.growth[name] = most - self._start[name]
            self._outcome.late_growth[name] = most - self._half[name]

    def _look(self) -> None:
        while not self._ended.wait(_LOOK):
            for name, pid in self._pids.items():
                self._most[name] = max(self._most[name], _resident(pid))


def _resident(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def main() -> None:
    """Run all patterns and say what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=36_000)
    parser.add_argument("--memory", type=int, default=16, help="the bound on each side, in MiB")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    nursery, failed = Nursery(), False
    print("| speeds | over | batches | s | held | buffers | consumer grew | workers grew | second half | |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="feed-memory-") as folder:
        for shared in (False, True):
            for pattern in PATTERNS:
                log = Path(folder, f"{pattern} {shared}.log")
                outcome = run(
                    pattern,
                    shared,
                    options.batches,
                    options.memory * MEBI,
                    lambda *words, log=log, **settings: nursery.start(log, *words, **settings),
                )
                workers = [size for side, size in outcome.growth.items() if side != "consumer"]
                sizes = [outcome.held, outcome.buffers, outcome.growth["consumer"], max(workers)]
                sizes.append(max(outcome.late_growth.values()))
                cells = [pattern, "shared memory" if shared else "sockets", f"{outcome.batches}"]
                cells += [f"{outcome.seconds:.0f}", *[f"{size / MEBI:.1f}" for size in sizes]]
                print(f"| {' | '.join(cells)} | {outcome.problem or 'ok'} |", flush=True)
                failed |= bool(outcome.problem)
    nursery.close()
    sys.exit(failed)


if __name__ == "__main__":
    main()
