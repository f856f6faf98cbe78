"""How fast this machine is now, to when the model was measured: the same steps, by turns with what is compared."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from contextlib import ExitStack
from types import TracebackType

from distributed_training.bench.turn_process import TurnProcess
from distributed_training.planning.measuring import Laboratory, at_once, jitter_of
from distributed_training.planning.profile import Profile
from distributed_training.runtime.errors import BenchError

_SECONDS = 0.6  # of a turn
_STEPS = (3, 60)


def steps_for(seconds: float) -> int:
    """Steps of a turn, where one takes so long."""
    return int(max(_STEPS[0], min(_STEPS[1], _SECONDS / seconds)))


class Pace:
    """Processes that stay and do `single`'s steps when asked. Use it in `with`: they are ended at its end.

    Only on a CPU: a GPU's speed drifts little, and its memory may not hold another model.
    """

    def __init__(self, lab: Laboratory, profile: Profile) -> None:
        self._lab, self._profile = lab, profile
        self._processes: dict[tuple[int, int], list[TurnProcess]] = {}
        self._failed: set[tuple[int, int]] = set()
        self._stack = ExitStack()
        self._series: dict[int, list[list[float]]] = {}
        self.seen: dict[tuple[int, int], list[float]] = {}
        """Seconds of a step by processes and their batch, turn by turn."""

    def now(self, copies: int, batch: int) -> float:
        """Time of a step of so many processes beside each other, to what it took when it was measured."""
        key = copies, batch
        if self._profile.device != "cpu" or key in self._failed:
            return 1.0
        measured = self._profile.parts(batch, copies).whole
        try:
            if key not in self._processes:
                self._processes[key] = self._lab.reference(copies, batch, steps_for(measured), self._stack)
                at_once(self._processes[key])  # the first one is slower
            answers = at_once(self._processes[key])
        except BenchError as error:  # for want of memory most likely: strategies can be compared without it
            self._failed.add(key)
            self._lab.say(f"  the machine's pace is not known ({error}): drift counts as an error")
            return 1.0
        took = max(float(found["step"]) for found in answers)
        self._series.setdefault(copies, []).extend(found["series"] for found in answers)
        self.seen.setdefault(key, []).append(took)
        return took / measured

    def largest(self, copies: int) -> int:
        """Batch that was measured with so many processes."""
        return max(self._profile.times[self._profile.copies(copies)])

    def rebase(self) -> dict[int, float]:
        """Bring the profile to the middle of all turns: minutes say more than the second in which it was measured.

        Gives by what its times were multiplied, by processes beside each other.
        """
        factors: dict[int, float] = {}
        for copies, found in self._profile.times.items():
            known = [
                statistics.median(took) / self._profile.parts(batch, copies).whole
                for (beside, batch), took in self.seen.items()
                if beside == copies and batch in found
            ]
            factors[copies] = statistics.median(known) if known else 1.0
        for copies, found in self._profile.times.items():
            for one in found.values():
                one["parts"] = {name: took * factors[copies] for name, took in one["parts"].items()}
        own = self._profile.own
        self._profile.own = {label: took * factors.get(1, 1.0) for label, took in own.items()}
        self._profile.jitter |= self.jitter
        return factors

    @property
    def jitter(self) -> dict[int, float]:
        """By processes beside each other, as `Profile.jitter`, over all turns."""
        return {copies: jitter_of(series) for copies, series in self._series.items()}

    @property
    def noise(self) -> tuple[float, float] | None:
        """(middle, largest) distance of the same steps from their median over all turns, as a share of it."""
        far = [abs(distance) for values in self.seen.values() for distance in _distances(values)]
        return (statistics.median(far), max(far)) if len(far) > 1 else None

    def __enter__(self) -> Pace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)


def _distances(values: list[float]) -> Iterable[float]:
    middle = statistics.median(values)
    return (value / middle - 1 for value in values)
