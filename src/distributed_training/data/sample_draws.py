"""Loading samples one by one, so that all that is random in a sample is a function of (key, its number).

A generator that samples draw from is seeded before each of them. One that they were not seen to draw from is watched
instead: as long as that stays so, samples are what they would be with it seeded. If it does not, what was loaded counts
for nothing, and is loaded again with all generators seeded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from distributed_training.data.randomness import ALL, Watch, Which, seeders, seeds_of_samples, watching

_SURE = 2  # batches: a draw seen once may have been somebody else's


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

    def load(
        self,
        load: Callable[[Any], Any],
        items: Sequence[Any],
        samples: Sequence[int],
        key: int,
        again: Callable[[], Callable[[Any], Any]],
    ) -> list[Any]:
        """`load` of each of the items, which belong to these samples.

        `again` gives the function for loading once more from the beginning, as an error has to be told: see above.
        """
        with watching() as watch:
            rows = self._try(watch, load, items, samples, key)
            if rows is None:
                self.drew, watch.seeded = True, ALL
                rows = _load(again(), items, seeds_of_samples(key, samples), ALL)
        return rows

    def _try(
        self, watch: Watch, load: Callable[[Any], Any], items: Sequence[Any], samples: Sequence[int], key: int
    ) -> list[Any] | None:
        seeded, rows = self.seeded, None
        seeds = seeds_of_samples(key, samples) if self._unsure or any(seeded) else None
        try:
            first = []
            if self._unsure and seeds is not None:  # samples that draw mostly do so in the first: no second load
                loaded, drawn = watch.drawn_by(seeds[0], lambda: load(items[0]))
                first = [loaded]
                if any(drawn):
                    self._count(drawn)
                    self.drew, watch.seeded = True, ALL
                    return first + _load(load, items[1:], seeds[1:], ALL)
            watch.seeded = seeded
            rows = first + _load(load, items[len(first) :], seeds[len(first) :] if seeds else None, seeded)
        except Exception:
            rows = None  # with everything seeded it may not come again
        drawn = watch.drawn()
        self._count(drawn)
        self.drew = any(seeded)
        return None if any(drawn) else rows

    def _count(self, drawn: Which) -> None:
        for generator, drew in enumerate(drawn):
            if self._draws[generator] < _SURE:
                self._draws[generator] = self._draws[generator] + 1 if drew else 0
        self._unsure = any(0 < count < _SURE for count in self._draws)


def _load(load: Callable[[Any], Any], items: Sequence[Any], seeds: list[int] | None, which: Which) -> list[Any]:
    seed = seeders(which)
    if not seed or seeds is None:
        return [load(item) for item in items]
    rows = []
    for item, value in zip(items, seeds):
        for seeder in seed:
            seeder(value)
        rows.append(load(item))
    return rows
