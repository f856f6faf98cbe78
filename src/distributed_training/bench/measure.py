"""Measuring side by side: variants take turns in one run, so that a noisy machine is noisy for all of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

_NOISY = 0.10


@dataclass(frozen=True)
class Measured:
    """What one variant measured, in its own unit, over all rounds."""

    values: list[float]

    @property
    def median(self) -> float:
        """The middle value."""
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """Distance between the quartiles as a share of the median: 0.02 is quiet, 0.2 is not to be trusted."""
        if len(self.values) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return (high - low) / self.median if self.median else 0.0

    @property
    def noisy(self) -> bool:
        """Whether the spread is too large to conclude anything small."""
        return self.spread > _NOISY


def interleave(variants: Mapping[str, Callable[[], float]], rounds: int, warmup: int = 1) -> dict[str, Measured]:
    """Run every variant once a round; each returns its own measurement. The first rounds are thrown away.

    Every other round runs backwards, so that what a variant leaves behind (caches, heat) does not always meet one.
    """
    values: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(warmup + rounds):
        order = list(variants)[:: 1 if number % 2 == 0 else -1]
        for name in order:
            value = variants[name]()
            if number >= warmup:
                values[name].append(value)
    return {name: Measured(found) for name, found in values.items()}


def ratio(measured: Mapping[str, Measured], of: str, to: str) -> float:
    """Median over rounds of `of` divided by `to`, each round by itself: drift of the machine cancels."""
    pairs = zip(measured[of].values, measured[to].values)
    return statistics.median([a / b for a, b in pairs])


def difference(measured: Mapping[str, Measured], of: str, to: str) -> float:
    """Median over rounds of `of` minus `to`."""
    pairs = zip(measured[of].values, measured[to].values)
    return statistics.median([a - b for a, b in pairs])
