"""Variants in processes of their own that take turns: set up one after the other, then measured by turns.

Setting up is measured work for some (they choose what is fastest here), so it is done alone; only imports, which take
most of the time of the small ones, are done side by side before.

All stay in memory while they wait, if there is room. One that would leave too little for the others ends after its
turn, and is set up anew for its next.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self

from distributed_training.bench.options import BenchOptions
from distributed_training.bench.turn_process import Start, TurnProcess
from distributed_training.bench.turn_worker import available
from distributed_training.runtime.errors import BenchError
from distributed_training.runtime.meters import resident

Answers = dict[str, list[dict[str, Any]]]
_ROOM = 1.3  # times the largest need so far that must stay free for whoever is next
_SHARE = 0.6  # of the free memory that processes which have only imported may take
_RESTLESS = ("horovodrun",)  # their processes talk to each other also while there is nothing to do


class Rotation:
    """Processes by the names of their variants. Use it in `with`: all of them are ended at its end."""

    def __init__(self, options: BenchOptions, what: str = "") -> None:
        self._options, self._what = options, what
        self._starts: dict[str, Start] = {}
        self._running: dict[str, TurnProcess] = {}
        self._largest = 0.0
        self._crowded: set[str] = set()
        self.facts: dict[str, dict[str, Any]] = {}
        """What each variant that could be set up said of itself then."""
        self.failed: dict[str, str] = {}
        """Variants that could not be set up, and why."""

    def set_up(self, starts: Mapping[str, Start]) -> None:
        """Start all of them. Those that cannot be set up are in `failed`."""
        self._starts |= starts
        ahead = [name for name in starts if not self._always_anew(name)]
        if sum(starts[name].ranks for name in ahead) * resident() < _SHARE * available():
            for name in ahead:
                self._running[name] = self._process(name)
        for name in list(self._running):
            with self._named_if_it_fails(name):
                self._running[name].wait_for_imports()
        for name in [name for name in starts if name not in self.failed]:
            self._say(f"setting up {name}")
            with self._named_if_it_fails(name):
                self.facts[name] = self._begin(name)
                self._keep_if_room(name, self.facts[name])

    def measure(self, orders: Mapping[str, dict[str, Any]] | None = None) -> Answers:
        """What each variant answered, round by round, to its order if it has one."""
        turns = {name: functools.partial(self._turn, name, (orders or {}).get(name, {})) for name in self.facts}
        return self._options.turns(turns, self._what) if turns else {}

    @property
    def notes(self) -> list[str]:
        """For the report: what was not kept from turn to turn."""
        if self._options.fresh:
            return ["Every turn started its processes anew."]
        names = [name for name in self._starts if name in self._crowded]
        return [f"Memory was short, so that every turn of these started anew: {', '.join(names)}."] if names else []

    @contextmanager
    def _named_if_it_fails(self, name: str) -> Iterator[None]:
        try:
            yield
        except BenchError as error:
            self.failed[name] = _short(str(error).removeprefix(f"{name}: "))
            self._say(f"{name} cannot run here: {self.failed[name]}")
            self._end(name)

    def _turn(self, name: str, order: dict[str, Any]) -> dict[str, Any]:
        if name not in self._running:
            self._begin(name)
        answer = self._running[name].turn(**order)
        self._keep_if_room(name, answer)
        return answer

    def _begin(self, name: str) -> dict[str, Any]:
        """Set a variant up; where that fails beside the others for want of memory, it is tried once more alone."""
        try:
            return self._ready(name)
        except BenchError as error:
            self._end(name)
            if "memory" not in str(error) or not self._running:
                raise
            self.close()
            return self._ready(name)

    def _ready(self, name: str) -> dict[str, Any]:
        if name not in self._running:
            self._running[name] = self._process(name)
        return self._running[name].ready()

    def _process(self, name: str) -> TurnProcess:
        return TurnProcess(name, self._starts[name], self._options.timeout)

    def _always_anew(self, name: str) -> bool:
        return self._options.fresh or self._starts[name].launcher in _RESTLESS

    def _keep_if_room(self, name: str, answer: dict[str, Any]) -> None:
        self._largest = max(self._largest, answer.get("reserved_bytes", 0.0))
        crowded = answer.get("free_bytes", self._largest * _ROOM) < self._largest * _ROOM
        if crowded:
            self._crowded.add(name)
        if crowded or self._always_anew(name):
            self._end(name)

    def _end(self, name: str) -> None:
        if name in self._running:
            self._running.pop(name).close()

    def _say(self, line: str) -> None:
        self._options.say(f"{self._what}: {line}" if self._what else line)

    def close(self) -> None:
        """End all processes."""
        with ExitStack() as stack:  # whatever happens while one ends, the others do too
            while self._running:
                process = self._running.popitem()[1]
                stack.callback(process.close)
                process.dismiss()  # so that all end side by side

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Forks(TurnProcess):
    """A process that gives every order to a function of its own in a fork: see `forked_turns`."""

    def __init__(self, target: str, options: BenchOptions) -> None:
        start = Start("distributed_training.bench.forked_turns:run", {"target": target})
        super().__init__(target, start, options.timeout)
        self._options = options

    def measure(self, orders: dict[str, dict[str, Any]], what: str) -> Answers:
        """What the function answered to the order of each variant, by turns."""
        turns = {name: functools.partial(self.turn, **order) for name, order in orders.items()}
        return self._options.turns(turns, what) if turns else {}


def _short(text: str) -> str:
    """An error in a line: the last error among what a process said, or the last that it said at all."""
    first, *said = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in said if "rror" in line]
    return (errors[-1] if errors else " ".join([first, *said[-1:]]))[:300]
