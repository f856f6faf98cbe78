"""Variants in processes of their own that take turns: set up one after the other, then measured by turns.

Setting up is measured work for some (they choose what is fastest here), so it is done alone; only imports, which take
most of the time of the small ones, are done side by side before.

All stay in memory while they wait, if there is room. On a GPU one that would leave too little for the others ends after
its turn, and is set up anew for its next.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from distributed_training.bench.options import BenchOptions
from distributed_training.bench.turn_process import TurnProcess
from distributed_training.runtime.errors import BenchError

Answers = dict[str, list[dict[str, Any]]]
_ROOM = 1.3  # times the largest need so far that must stay free for whoever is next


@dataclass(frozen=True)
class Start:
    """How the process of a variant is started; see `TurnProcess`."""

    target: str
    arguments: dict[str, Any]


class Rotation:
    """Processes by the names of their variants."""

    def __init__(self, options: BenchOptions, what: str) -> None:
        self._options, self._what = options, what
        self._starts: dict[str, Start] = {}
        self._running: dict[str, TurnProcess] = {}
        self._largest = 0.0
        self.failed: dict[str, str] = {}
        """Variants that could not be set up, and why."""

    def measure(self, starts: dict[str, Start], **order: Any) -> Answers:
        """What each variant answered to `order`, round by round. Those that cannot be set up are in `failed`."""
        self._starts |= starts
        if not self._options.fresh:
            self._running |= {name: self._process(name) for name in starts}
        for name in list(self._running):
            with self._named_if_it_fails(name):
                self._running[name].wait_for_imports()
        for name in list(self._starts):
            self._options.say(f"{self._what}: setting up {name}")
            with self._named_if_it_fails(name):
                self._room_for(name, self._run(name))
        turns = {name: functools.partial(self._turn, name, order) for name in self._starts}
        return self._options.turns(turns, self._what) if turns else {}

    @contextmanager
    def _named_if_it_fails(self, name: str) -> Iterator[None]:
        try:
            yield
        except BenchError as error:
            self.failed[name] = str(error).removeprefix(f"{name}: ").split("\n")[0]
            self._starts.pop(name)
            if name in self._running:
                self._running.pop(name).close()

    def _turn(self, name: str, order: dict[str, Any]) -> dict[str, Any]:
        if name not in self._running:
            self._run(name)
        answer = self._running[name].turn(**order)
        self._room_for(name, answer)
        return answer

    def _run(self, name: str) -> dict[str, Any]:
        """Set a variant up; where that fails beside the others, it is tried once more alone."""
        try:
            return self._begin(name)
        except BenchError:
            if "memory" not in self._last_error or not self._running:
                raise
            self.close()
            return self._begin(name)

    def _process(self, name: str) -> TurnProcess:
        start = self._starts[name]
        return TurnProcess(name, start.target, start.arguments, self._options.timeout)

    def _begin(self, name: str) -> dict[str, Any]:
        self._last_error = ""
        process = self._running.get(name) or self._process(name)
        self._running[name] = process
        try:
            return process.ready()
        except BaseException as error:
            self._last_error = str(error)
            self._running.pop(name).close()
            raise

    def _room_for(self, name: str, answer: dict[str, Any]) -> None:
        self._largest = max(self._largest, answer.get("reserved_bytes", 0.0))
        if self._options.fresh or answer.get("free_bytes", self._largest * _ROOM) < self._largest * _ROOM:
            self._running.pop(name).close()

    def close(self) -> None:
        """End all processes."""
        while self._running:
            self._running.popitem()[1].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Forks(TurnProcess):
    """A process that gives every order to a function of its own in a fork: see `forked_turns`."""

    def __init__(self, target: str, options: BenchOptions) -> None:
        super().__init__(target, "distributed_training.bench.forked_turns:run", {"target": target}, options.timeout)
        self._options = options

    def measure(self, orders: dict[str, dict[str, Any]], what: str) -> Answers:
        """What the function answered to the order of each variant, by turns."""
        turns = {name: functools.partial(self.turn, **order) for name, order in orders.items()}
        return self._options.turns(turns, what) if turns else {}
