"""Measuring side by side: variants take turns in one run, so that a noisy machine is noisy for all of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

_NOISY = 0.10
_SMALL = 0.05  # a margin above this hides differences that people ask about
ENOUGH = 3
"""Rounds below which nothing is known of the noise."""

Result = TypeVar("Result")


def spread_of(values: Sequence[float]) -> float:
    """Distance between the quartiles as a share of the median: 0.02 is quiet, 0.2 is not to be trusted."""
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return abs((high - low) / middle) if middle else 0.0


def margin_of(values: Sequence[float]) -> float:
    """How far the median may be from the true one, as a share of it, 19 times of 20. Infinite below three values.

    The standard error of a median with the spread for sigma, widened for few rounds as Student's t is. More rounds
    make it smaller; the spread stays.
    """
    count = len(values)
    if count < ENOUGH:
        return math.inf
    return (1.96 + 4.7 / (count - 1)) * 1.2533 * (spread_of(values) / 1.349) / math.sqrt(count)


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
        """Distance between the quartiles as a share of the median."""
        return spread_of(self.values)

    @property
    def noisy(self) -> bool:
        """Whether the spread is too large to conclude anything small."""
        return self.spread > _NOISY


@dataclass(frozen=True)
class Comparison:
    """One variant beside another: their ratio in each round by itself, so that drift of the machine cancels."""

    ratios: list[float]

    @property
    def median(self) -> float:
        """The middle ratio: 1.2 is a fifth more than the reference."""
        return statistics.median(self.ratios)

    @property
    def spread(self) -> float:
        """Distance between the quartiles of the ratios as a share of their median."""
        return spread_of(self.ratios)

    @property
    def margin(self) -> float:
        """How far the ratio may be from the true one, 19 times of 20."""
        return margin_of(self.ratios) * self.median

    @property
    def differs(self) -> bool:
        """Whether the two are different for certain."""
        return abs(self.median - 1.0) > self.margin

    @property
    def too_noisy(self) -> bool:
        """Whether nothing can be concluded: no difference shows, and one that matters could hide."""
        return not self.differs and self.margin > _SMALL

    @property
    def words(self) -> str:
        """What can be concluded, for a report. Empty where the ratio speaks for itself."""
        if len(self.ratios) < ENOUGH:
            return f"too few rounds to conclude ({len(self.ratios)}): raise --rounds"
        if self.too_noisy:
            return f"too noisy to conclude: spread {self.spread:.2f}; close other programs or raise --rounds"
        return "" if self.differs else "no difference beyond noise"


def turns(
    variants: Mapping[str, Callable[[], Result]],
    rounds: int,
    warmup: int = 1,
    told: Callable[[int, str], None] | None = None,
    stopped: Callable[[int], None] | None = None,
) -> dict[str, list[Result]]:
    """Run every variant once a round; gives what each returned, round by round. The first rounds are thrown away.

    Every other round runs backwards, so that what a variant leaves behind (caches, heat) does not always meet one.
    `told` hears the number of turns done and which variant is next. Where `stopped` is given, Ctrl-C after the first
    whole round ends it early: `stopped` hears how many rounds are whole, and what they gave is returned.
    """
    results: dict[str, list[Result]] = {name: [] for name in variants}
    done = 0
    try:
        for number in range(warmup + rounds):
            order = list(variants)[:: 1 if number % 2 == 0 else -1]
            for name in order:
                if told is not None:
                    told(done, name)
                result = variants[name]()
                done += 1
                if number >= warmup:
                    results[name].append(result)
    except KeyboardInterrupt:
        whole = min(map(len, results.values()))
        if stopped is None or whole == 0:
            raise
        stopped(whole)
        return {name: values[:whole] for name, values in results.items()}
    return results


def interleave(
    variants: Mapping[str, Callable[[], float]],
    rounds: int,
    warmup: int = 1,
    told: Callable[[int, str], None] | None = None,
) -> dict[str, Measured]:
    """`turns` of variants that each return one measurement."""
    return {name: Measured(found) for name, found in turns(variants, rounds, warmup, told).items()}


def compare(values: Sequence[float], reference: Sequence[float]) -> Comparison:
    """Values beside those of a reference, round by round."""
    return Comparison([a / b for a, b in zip(values, reference) if b])


def ratio(measured: Mapping[str, Measured], of: str, to: str) -> float:
    """Median over rounds of `of` divided by `to`, each round by itself: drift of the machine cancels."""
    return compare(measured[of].values, measured[to].values).median


def difference(measured: Mapping[str, Measured], of: str, to: str) -> float:
    """Median over rounds of `of` minus `to`."""
    pairs = zip(measured[of].values, measured[to].values)
    return statistics.median([a - b for a, b in pairs])
