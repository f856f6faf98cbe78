"""What every part of the suite is told: how often, on what, with which model, and whom to tell how far it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from distributed_training.bench.measure import Measured, turns

if TYPE_CHECKING:
    from distributed_training.config import Config

Result = TypeVar("Result")


def _silent(line: str) -> None:
    """Nobody listens."""


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Options of one run of `dtrain bench`. A part takes those that mean something to it."""

    rounds: int = 7
    """Measured rounds; every variant has one turn in each."""
    warmup: int = 1
    """Rounds before them that are thrown away."""
    quick: bool = False
    """Seconds in place of minutes: less work in a turn. `rounds` is what the command made of it already."""
    device: str = "auto"
    """`auto`, `cpu` or `cuda`, as `training.device`."""
    processes: tuple[int, ...] = ()
    """Numbers of processes (GPUs where there are some) to compare; empty: the part's own choice."""
    strategies: tuple[str, ...] = ()
    """Strategies to compare; empty: the part's own choice."""
    cases: tuple[str, ...] = ()
    """Cases to measure, by the part's own names (`--cases`); empty: those that make sense on the device."""
    variants: tuple[str, ...] = ()
    """Variants to compare, by the part's own names (`--variants`); empty: all that can run here."""
    model: str | None = None
    """A name of `models/`; None: the part's own choice."""
    batch_size: int | None = None
    """None: the part's own choice."""
    config: Config | None = None
    """The user's own job, where a config file or settings were given."""
    fresh: bool = False
    """Start the processes of a job anew for every turn: less memory at a time, much more time."""
    timeout: float = 600.0
    """Seconds that one turn may take: the deadline of every wait."""
    say: Callable[[str], None] = field(default=_silent, compare=False)
    """Takes one line of progress."""
    cut: list[str] = field(default_factory=list, compare=False)
    """Not empty once Ctrl-C has ended the rounds early: a part then finishes with what it has."""

    def interleave(self, variants: Mapping[str, Callable[[], float]], what: str = "") -> dict[str, Measured]:
        """`measure.interleave` with these rounds; tells how far it is and how long it still takes."""
        return {name: Measured(found) for name, found in self.turns(variants, what).items()}

    def turns(self, variants: Mapping[str, Callable[[], Result]], what: str = "") -> dict[str, list[Result]]:
        """The same for variants that return more than one number: what each returned, round by round."""
        if self.cut:  # the wish to end was heard in an earlier comparison of this part
            raise KeyboardInterrupt
        total = (self.warmup + self.rounds) * len(variants)
        begin = time.monotonic()

        def tell(done: int, name: str) -> None:
            number = done // len(variants) + 1 - self.warmup
            place = f"round {number} of {self.rounds}" if number > 0 else "warm-up"
            left = (time.monotonic() - begin) / done * (total - done) if done else 0.0
            wait = f" (about {spoken(left)} left)" if done else ""
            self.say(f"{what + ': ' if what else ''}{place}, {name}{wait}")

        def stop(whole: int) -> None:
            self.cut.append(f"interrupted after {whole} of {self.rounds} rounds")
            self.say(self.cut[-1])

        return turns(variants, self.rounds, self.warmup, tell, stop)


def spoken(seconds: float) -> str:
    """A time to wait, as people say it."""
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
