"""One searched value: a range of numbers or a choice. It can be drawn, suggested by Optuna and cut into a grid."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from distributed_training.runtime.errors import ConfigError


@dataclass(frozen=True)
class Domain(ABC):
    """The values that one parameter may have."""

    when: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Other parameters and the values of theirs with which this one is used at all."""

    @abstractmethod
    def draw(self, random: np.random.Generator) -> Any:
        """A value at random."""

    @abstractmethod
    def suggest(self, trial: Any, name: str) -> Any:
        """A value that an Optuna trial chooses."""

    @abstractmethod
    def grid(self, points: int) -> list[Any]:
        """All values, or about `points` of a range."""

    @abstractmethod
    def nearest(self, value: Any) -> Any:
        """The value of this domain that is closest to another one."""

    @abstractmethod
    def written(self) -> dict[str, Any]:
        """As a config has it, without the condition."""

    def described(self) -> dict[str, Any]:
        """As a config has it."""
        return {**self.written(), **({"when": {k: list(v) for k, v in self.when.items()}} if self.when else {})}

    @abstractmethod
    def for_ray(self) -> Any:
        """As `ray.tune` has it, without the condition."""

    @abstractmethod
    def extremes(self) -> list[Any]:
        """Values by which it can be told whether all are of the right type."""


@dataclass(frozen=True)
class Choice(Domain):
    """One of several values, of any type that a config can hold."""

    values: tuple[Any, ...] = ()

    def draw(self, random: np.random.Generator) -> Any:
        return self.values[int(random.integers(len(self.values)))]

    def suggest(self, trial: Any, name: str) -> Any:
        if all(value is None or isinstance(value, (bool, int, float, str)) for value in self.values):
            return trial.suggest_categorical(name, list(self.values))
        # Optuna knows only scalars as choices: lists and mappings are chosen by their number.
        return self.values[trial.suggest_categorical(name, list(range(len(self.values))))]

    def grid(self, points: int) -> list[Any]:
        return list(self.values)

    def nearest(self, value: Any) -> Any:
        return value if value in self.values else self.values[0]

    def written(self) -> dict[str, Any]:
        return {"choice": list(self.values)}

    def for_ray(self) -> Any:
        from ray import tune

        return tune.choice(list(self.values))

    def extremes(self) -> list[Any]:
        return list(self.values)


@dataclass(frozen=True)
class Range(Domain):
    """Numbers from `low` to `high`, both of them possible."""

    low: float = 0.0
    high: float = 1.0
    whole: bool = False
    """Only whole numbers."""
    log: bool = False
    """Each factor of ten is as likely as any other."""
    step: float | None = None
    """Only `low` plus multiples of it."""
    points: int | None = None
    """Values in a grid."""

    def draw(self, random: np.random.Generator) -> Any:
        if self.log:
            return self.nearest(math.exp(random.uniform(math.log(self.low), math.log(self.high))))
        if self.whole and self.step is None:
            return int(random.integers(int(self.low), int(self.high) + 1))
        if self.step is not None:
            return self._at(int(random.integers(self._steps + 1)))
        return float(random.uniform(self.low, self.high))

    def suggest(self, trial: Any, name: str) -> Any:
        if self.whole:
            step = int(self.step or 1)
            return trial.suggest_int(name, int(self.low), int(self.high), step=step, log=self.log)
        return trial.suggest_float(name, self.low, self.high, step=self.step, log=self.log)

    def grid(self, points: int) -> list[Any]:
        if self.points is None and self.step is not None:
            return [self._at(n) for n in range(self._steps + 1)]
        if self.points is None and self.whole and not self.log and self.high - self.low < points:
            return list(range(int(self.low), int(self.high) + 1))
        space = np.geomspace if self.log else np.linspace
        values = [self.nearest(float(value)) for value in space(self.low, self.high, self.points or points)]
        return list(dict.fromkeys(values))

    def nearest(self, value: Any) -> Any:
        value = min(max(float(value), self.low), self.high)
        if self.step is not None:
            return self._at(min(round((value - self.low) / self.step), self._steps))
        return round(value) if self.whole else value

    def written(self) -> dict[str, Any]:
        kind = "int" if self.whole else "loguniform" if self.log else "uniform"
        options = {"log": True if self.whole and self.log else None, "step": self.step, "points": self.points}
        return {kind: self.extremes(), **{name: value for name, value in options.items() if value is not None}}

    def for_ray(self) -> Any:
        from ray import tune

        if self.step is not None:
            return tune.choice(self.grid(0))
        if self.whole:  # its upper end is not one of its values
            return (tune.lograndint if self.log else tune.randint)(int(self.low), int(self.high) + 1)
        return (tune.loguniform if self.log else tune.uniform)(self.low, self.high)

    def extremes(self) -> list[Any]:
        return [int(self.low), int(self.high)] if self.whole else [float(self.low), float(self.high)]

    @property
    def _steps(self) -> int:
        assert self.step is not None
        return int((self.high - self.low) / self.step + 1e-9)

    def _at(self, number: int) -> Any:
        value = self.low + number * (self.step or 0)
        return int(value) if self.whole else float(f"{value:.12g}")  # 0.1 + 2 * 0.1 is 0.3 to users


_RANGES = {
    "uniform": {},
    "loguniform": {"log": True},
    "int": {"whole": True},
    "randint": {"whole": True},
    "lograndint": {"whole": True, "log": True},
}
_CHOICES = ("choice", "grid")
KINDS = ("uniform", "loguniform", "int", "choice")
_OPTIONS = {"log", "step", "points", "when"}


def is_domain(value: Any) -> bool:
    """Whether a mapping describes values, and not parameters that have names of their own."""
    return isinstance(value, Mapping) and any(kind in value for kind in (*_RANGES, *_CHOICES))


def read_domain(name: str, value: Any) -> Domain:
    """What was written for a parameter: `{loguniform: [1e-4, 1e-1]}`, a list of choices, a domain of Ray's."""
    if isinstance(value, Domain):
        return value
    if isinstance(value, (list, tuple)):
        value = {"choice": value}
    if type(value).__module__.startswith("ray."):
        return _from_ray(name, value)
    if not isinstance(value, Mapping):
        raise ConfigError(f"the space: {name}={value!r} says no values; write {name}: {{uniform: [0.1, 1.0]}}")
    if set(value) == {"grid_search"}:  # as Ray's own tune.grid_search writes it
        value = {"choice": value["grid_search"]}
    kinds = [kind for kind in (*_RANGES, *_CHOICES) if kind in value]
    if len(kinds) != 1:
        given = ", ".join(map(str, value)) or "nothing"
        raise ConfigError(f"the space: {name} must have one of {', '.join(KINDS)}, and has {given}")
    kind = kinds[0]
    unknown = set(value) - {kind} - _OPTIONS
    if unknown:
        raise ConfigError(
            f"the space: {name}: {', '.join(map(str, unknown))} is no option; they are {', '.join(sorted(_OPTIONS))}"
        )
    when = _condition(name, value.get("when"))
    if kind in _CHOICES:
        return _choice(name, value[kind], when)
    options = {**_RANGES[kind], **{key: value[key] for key in ("log", "step", "points") if value.get(key) is not None}}
    return _range(name, kind, value[kind], options, when)


def _condition(name: str, when: Any) -> dict[str, tuple[Any, ...]]:
    if when is None:
        return {}
    if not isinstance(when, Mapping) or not when:
        raise ConfigError(
            f"the space: {name}: when={when!r} must name a setting and its value: {{training.optimizer: sgd}}"
        )
    return {str(key): tuple(v) if isinstance(v, (list, tuple)) else (v,) for key, v in when.items()}


def _choice(name: str, values: Any, when: Mapping[str, tuple[Any, ...]]) -> Choice:
    if not isinstance(values, (list, tuple)):
        raise ConfigError(f"the space: {name}: a choice is a list of values, not {values!r}")
    if not values:
        raise ConfigError(f"the space: {name}: a choice of nothing; list at least one value")
    return Choice(when=when, values=tuple(list(v) if isinstance(v, tuple) else v for v in values))


def _range(name: str, kind: str, ends: Any, options: dict[str, Any], when: Mapping[str, tuple[Any, ...]]) -> Range:
    text = f"the space: {name}: {kind}: {ends}"
    try:
        low, high = (float(end) for end in ends)
    except (TypeError, ValueError):
        raise ConfigError(f"{text} is no range; give the lowest and the highest value: [0.1, 1.0]") from None
    whole, log, step = bool(options.get("whole")), bool(options.get("log")), options.get("step")
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ConfigError(f"{text} has no end; give two finite numbers")
    if low > high:
        raise ConfigError(f"{text}: the lowest value is above the highest; write [{ends[1]}, {ends[0]}]")
    if low == high:
        raise ConfigError(f"{text} is empty: both ends are {ends[0]}; set {name} in the config if it has one value")
    if log and low <= 0:
        raise ConfigError(f"{text}: a logarithmic range must begin above 0")
    if whole and (low % 1 or high % 1):
        raise ConfigError(f"{text}: ends of a range of whole numbers must be whole")
    if step is not None and (log or not 0 < float(step) <= high - low or (whole and float(step) % 1)):
        raise ConfigError(f"{text}: step={step} must be above 0, within the range, and is not for log ranges")
    if options.get("points") is not None and int(options["points"]) < 2:
        raise ConfigError(f"{text}: points={options['points']}: a range has at least 2 in a grid")
    points = int(options["points"]) if options.get("points") is not None else None
    return Range(
        when=when,
        low=low,
        high=high,
        whole=whole,
        log=log,
        step=float(step) if step is not None else None,
        points=points,
    )


def _from_ray(name: str, domain: Any) -> Domain:
    """A domain of `ray.tune`: uniform, loguniform, quniform, randint, choice and their like."""
    kind, sampler = type(domain).__name__, domain.get_sampler()
    step = getattr(sampler, "q", None)
    log = type(getattr(sampler, "sampler", sampler)).__name__ == "_LogUniform"
    if kind == "Categorical":
        return _choice(name, list(domain.categories), {})
    if kind == "Integer":
        high = domain.upper if step else domain.upper - 1  # Ray's upper end is not one of its values
        return _range(name, "int", [domain.lower, high], {"whole": True, "log": log, "step": step}, {})
    if kind == "Float" and math.isfinite(domain.lower) and math.isfinite(domain.upper):
        return _range(name, "uniform", [domain.lower, domain.upper], {"log": log, "step": step}, {})
    raise ConfigError(
        f"the space: {name}: {domain} of Ray is none that can be searched here; use {', '.join(KINDS)}, or pass a "
        "function of the other parameters as a constant of your own"
    )
