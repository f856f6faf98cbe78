"""Where the ranks of one job on a Ray cluster report, and hear what they are to do: an actor beside the launcher.

Ray's own way for the output of workers goes through files and a printer that leaves out lines that look alike. Here the
launcher gets what a rank writes as it is, in order, and the facts of each end: it has the last word on the screen.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

_KEPT = 32 << 20  # bytes of output that wait for a launcher that does not read
_SILENT = 30.0  # seconds after which a rank that says nothing is no longer counted
OUT, ERR = "out", "err"


@dataclass(frozen=True)
class Began:
    """A rank's process runs."""

    start: int
    """Which start of all ranks this belongs to, from 0."""
    rank: int
    size: int
    where: str
    """Machine and process, for messages."""


@dataclass(frozen=True)
class End:
    """A rank's process has ended."""

    start: int
    rank: int
    size: int
    where: str
    pid: int
    code: int
    """Exit code; negative: the signal that ended it."""
    error: dict[str, Any] | None
    """What it left for the launcher: see `runtime/failure.py`."""
    told: str = ""
    """Name of the signal by which it was asked to save and end."""


@dataclass(frozen=True)
class Output:
    """What a rank wrote."""

    stream: str
    text: bytes


class Desk:
    """The actor. Every call returns at once."""

    def __init__(self) -> None:
        self._events: deque[Began | End | Output] = deque()
        self._bytes = 0
        self._starts = 0
        self._ends: dict[int, dict[int, End]] = {}
        self._order: str | None = None
        self._heard: dict[int, float] = {}

    def open(self) -> int:
        """All ranks are about to start: the number of this start."""
        self._starts += 1
        return self._starts - 1

    def begin(self, began: Began) -> None:
        """A rank says that it runs."""
        self._events.append(began)

    def say(self, rank: int, chunks: list[Output]) -> str | None:
        """What a rank wrote, or that it still runs; the answer is the name of the signal that it is to get, if any."""
        self._heard[rank] = time.monotonic()
        for chunk in chunks:
            if self._bytes + len(chunk.text) <= _KEPT:
                self._events.append(chunk)
                self._bytes += len(chunk.text)
        return self._order

    def end(self, end: End) -> None:
        """A rank says how its process ended."""
        self._ends.setdefault(end.start, {})[end.rank] = end
        self._heard.pop(end.rank, None)
        self._events.append(end)

    def ends(self, start: int) -> list[End]:
        """The ends of a start's ranks that are known so far."""
        return list(self._ends.get(start, {}).values())

    def order(self, signal: str) -> None:
        """The launcher wants all ranks to get a signal, those that start later too."""
        self._order = signal

    def read(self) -> tuple[list[Began | End | Output], int]:
        """For the launcher: what came since the last call, and how many ranks run as far as is known."""
        events = list(self._events)
        self._events.clear()
        self._bytes = 0
        now = time.monotonic()
        return events, sum(now - at < _SILENT for at in self._heard.values())


def open_desk() -> Any:
    """A desk on the machine of this process; it goes when this process does."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(Desk).options(num_cpus=0, scheduling_strategy=here).remote()
