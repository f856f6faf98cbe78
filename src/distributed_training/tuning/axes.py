"""Parameters as axes: which values a parameter can take, and where each of them lies."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distributed_training.runtime.errors import ConfigError
from distributed_training.tuning.domains import Choice, Domain, Range, read_domain
from distributed_training.tuning.records import Search, Trial

_LOG_RATIO = 100.0  # numbers that span more than this are drawn on a logarithmic axis if nobody said how


@dataclass(frozen=True)
class Axis:
    """One parameter: numbers between two ends, or named values."""

    key: str
    """The parameter as the search names it."""
    label: str
    """Its short name."""
    log: bool
    """Whether equal steps are equal factors."""
    whole: bool
    """Whether it takes whole numbers only."""
    low: float
    high: float
    names: tuple[str, ...] = ()
    """The values in words; none for numbers."""

    def place(self, value: Any) -> float | None:
        """Where a value lies between 0 and 1; None for one that was not set."""
        if self.names:
            name = value_text(value)
            return (self.names.index(name) + 0.5) / len(self.names) if name in self.names else None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            return None
        low, high, value = (math.log(v) if self.log else v for v in (self.low, self.high, max(value, self.low)))
        return (min(value, high) - low) / (high - low) if high > low else 0.5

    def ticks(self, most: int = 6) -> list[tuple[float, str]]:
        """Places between 0 and 1 and what to write there."""
        if self.names:
            return [((i + 0.5) / len(self.names), name) for i, name in enumerate(self.names)]
        values = _log_ticks(self.low, self.high, most) if self.log else _even_ticks(self.low, self.high, most)
        if self.whole:
            values = sorted({float(round(value)) for value in values if self.low <= round(value) <= self.high})
        return [(place, value_text(value)) for value in values if (place := self.place(value)) is not None]


def axes_of(search: Search, trials: Sequence[Trial]) -> list[Axis]:
    """An axis for every parameter of the space or of a trial that had more than one value to choose from."""
    keys = dict.fromkeys([*search.space, *(key for trial in trials for key in trial.parameters)])
    labels = short_names(list(keys))
    found = []
    for key in keys:
        tried = [trial.parameters[key] for trial in trials if key in trial.parameters]
        axis = _axis(key, labels[key], search.space.get(key), tried)
        if axis is not None:
            found.append(axis)
    return found


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """`training.lr` as `lr`; as much of the key as it takes to be unlike all others."""
    names = {}
    for key in keys:
        parts = key.split(".")
        names[key] = next(
            short
            for n in range(1, len(parts) + 1)
            if (short := ".".join(parts[-n:])) == key
            or not any(other != key and f".{other}".endswith(f".{short}") for other in keys)
        )
    return names


def parameters_text(parameters: Mapping[str, Any], between: str = " ") -> str:
    """`lr=0.003 batch_size=64`."""
    names = short_names(list(parameters))
    return between.join(f"{names[key]}={value_text(value)}" for key, value in parameters.items())


def value_text(value: Any) -> str:
    """A parameter's value as people write it."""
    if isinstance(value, bool) or value is None or isinstance(value, (list, tuple, dict)):
        return json.dumps(value, default=str)
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 or value != int(value) else f"{value:,.0f}"
    return str(value)


def _axis(key: str, label: str, spec: Any, tried: Sequence[Any]) -> Axis | None:
    domain = _domain(key, spec)
    if isinstance(domain, Choice):
        return _named(key, label, [*domain.values, *tried])
    numbers = [v for v in tried if isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v)]
    if isinstance(domain, Range):
        low, high = min([domain.low, *numbers]), max([domain.high, *numbers])  # a changed space may leave some outside
        return Axis(key, label, domain.log and low > 0, domain.whole, low, high)
    if len(numbers) < len(tried) or len(set(numbers)) < 2:
        return _named(key, label, tried)
    low, high = min(numbers), max(numbers)
    log = low > 0 and high / low > _LOG_RATIO
    return Axis(key, label, log, all(isinstance(v, int) for v in numbers), low, high)


def _domain(key: str, spec: Any) -> Domain | None:
    """What the space says of a parameter; None where it says nothing that is understood here."""
    try:
        return read_domain(key, spec) if spec is not None else None
    except ConfigError:
        return None


def _named(key: str, label: str, values: Sequence[Any]) -> Axis | None:
    names = tuple(dict.fromkeys(map(value_text, values)))
    return Axis(key, label, False, False, 0.0, 1.0, names) if len(names) > 1 else None


def _even_ticks(low: float, high: float, most: int) -> list[float]:
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10, 20) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        ticks = [f * 10.0**d for d in decades for f in factors if low * 0.999 <= f * 10.0**d <= high * 1.001]
        if len(ticks) <= most:
            break
    if len(ticks) > most:
        ticks = ticks[:: math.ceil(len(ticks) / most)]
    return ticks if len(ticks) > 1 else [low, high]
