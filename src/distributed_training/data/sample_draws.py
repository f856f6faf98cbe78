"""Loading samples one by one, so that all that is random in a sample is a function of (key, its number).

A generator that samples draw from is seeded before each of them. One that they were not seen to draw from is watched
instead: as long as that stays so, samples are what they would be with it seeded. If it does not, what was loaded counts
for nothing, and is loaded again with all generators seeded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from distributed_training.data.randomness import ALL, Watch, Which, seeders, seeds_of_samples, watching

_SURE = 2  # batches: a draw seen once may have been somebody else's


class Task(NamedTuple):
    """What is to be loaded: `load` of each of the items, which belong to these samples."""

    load: Callable[[Any], Any]
    items: Sequence[Any]
    samples: Sequence[int]
    key: int
    again: Callable[[], Callable[[Any], Any]]
    """Gives the function for loading once more from the beginning, as an error has to be told: see above."""


class Parts(NamedTuple):
    """How samples are handed over: so many at a time, each time before the next one is loaded."""

    sizes: Sequence[int]
    put: Callable[[int, list[Any]], None]
    """Takes the number of the first one, and them. Loading may begin anew: then it is called from the beginning."""


class SampleDraws:
    """What is known of one dataset's draws."""

    def __init__(self) -> None:
        self._draws = [0, 0, 0]  # for each generator: batches in a row in which it was seen to be drawn from
        self._unsure = True
        self.drew = True
        """Whether anything random went into what was loaded last. False only where that was seen."""

    @property
    def seeded(self) -> Which:
        """Generators that are known to be drawn from."""
        python, numpy, torch = self._draws
        return python >= _SURE, numpy >= _SURE, torch >= _SURE

    def load(self, task: Task) -> list[Any]:
        """What `task.load` makes of each item."""
        found: dict[int, list[Any]] = {}
        self.load_parts(task, Parts([len(task.items)], found.__setitem__))
        return found[0]

    def load_parts(self, task: Task, parts: Parts) -> None:
        """The same part by part."""
        with watching() as watch:
            if not self._try(watch, task, parts):
                self.drew, watch.seeded = True, ALL
                _load(task.again(), task.items, seeds_of_samples(task.key, task.samples), ALL, parts)

    def _try(self, watch: Watch, task: Task, parts: Parts) -> bool:
        """Load without seeds that are not known to be needed; whether that is good enough."""
        seeded, failed = self.seeded, False
        load, items = task.load, task.items
        seeds = seeds_of_samples(task.key, task.samples) if self._unsure or any(seeded) else None
        try:
            first = []
            if self._unsure and seeds is not None:  # samples that draw mostly do so in the first: no second load
                loaded, drawn = watch.drawn_by(seeds[0], lambda: load(items[0]))
                first = [loaded]
                if any(drawn):
                    self._count(drawn)
                    self.drew, watch.seeded = True, ALL
                    _load(load, items, seeds, ALL, parts, first)
                    return True
            watch.seeded = seeded
            _load(load, items, seeds, seeded, parts, first)
        except Exception:
            failed = True  # with everything seeded it may not come again
        drawn = watch.drawn()
        self._count(drawn)
        self.drew = any(seeded)
        return not failed and not any(drawn)

    def _count(self, drawn: Which) -> None:
        for generator, drew in enumerate(drawn):
            if self._draws[generator] < _SURE:
                self._draws[generator] = self._draws[generator] + 1 if drew else 0
        self._unsure = any(0 < count < _SURE for count in self._draws)


def _load(
    load: Callable[[Any], Any],
    items: Sequence[Any],
    seeds: list[int] | None,
    which: Which,
    parts: Parts,
    first: Sequence[Any] = (),
) -> None:
    """`first` are the samples of the first items, which are loaded already."""
    seed, begin = seeders(which), 0
    rows = list(first)
    for size in parts.sizes:
        end, start = begin + size, begin + len(rows)
        if not seed or seeds is None:
            rows += [load(item) for item in items[start:end]]
        else:
            for item, value in zip(items[start:end], seeds[start:end]):
                for seeder in seed:
                    seeder(value)
                rows.append(load(item))
        parts.put(begin, rows)
        begin, rows = end, []
