"""The space of a search: which settings are searched, in which ranges, and which only where others have some value."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from distributed_training.config import Config
from distributed_training.config.config import check_key, known_keys, resolve_alias, section_types
from distributed_training.runtime.errors import ConfigError
from distributed_training.tuning.domains import Domain, is_domain, read_domain

_PROBES = 16  # combinations looked at before a search, to see whether any of them is a config
_NOT_SEARCHED = ("tuning", "run", "tracking", "record", "checkpoint", "network")


def get_default_search_space() -> dict[str, Any]:
    """A space for most classifiers: rate, batch, optimizer and its momentum, weight decay, warm-up.

    The names are settings of dtrain. In a function of your own `config["lr"]` is found under its short name too.
    """
    return {
        "training.lr": {"loguniform": [1e-4, 1e-1]},
        "training.batch_size": {"choice": [32, 64, 128, 256]},
        "training.optimizer": {"choice": ["adamw", "sgd"]},
        "training.momentum": {"uniform": [0.5, 0.99], "when": {"training.optimizer": "sgd"}},
        "training.weight_decay": {"loguniform": [1e-6, 1e-1]},
    }


@dataclass(frozen=True)
class Space:
    """Parameters by name, each after those that its condition looks at."""

    domains: Mapping[str, Domain]
    fixed: Mapping[str, Any]
    """Values of settings that are not searched but looked at by conditions."""

    @classmethod
    def read(cls, written: Mapping[str, Any], base: Config | Mapping[str, Any]) -> Space:
        """What stands in `tuning.space`, or was given in Python. `base` has all that is not searched.

        With a `Config`, every name has to be one of its settings; a function of the user's own has names of its own.
        """
        settings = [name for name, free in known_keys().items() if not free] if isinstance(base, Config) else []
        given = dict(_opened(written, whole=settings))
        if not given:
            raise ConfigError(
                "the space is empty: nothing to search; give a section tuning.space, such as "
                "tuning: {space: {training.lr: {loguniform: [0.0001, 0.1]}}}"
            )
        domains: dict[str, Domain] = {}
        for name, value in given.items():
            if isinstance(base, Config):
                name = _setting(name)
            domains[name] = read_domain(name, value)
        fixed = _looked_at(domains, base)
        space = cls(_in_order(domains), fixed)
        if isinstance(base, Config):
            space.check(base)
        return space

    def described(self) -> dict[str, Any]:
        """The space as a config has it, whatever way it was written."""
        return {name: domain.described() for name, domain in self.domains.items()}

    def draw(self, random: np.random.Generator) -> dict[str, Any]:
        """Parameters at random. As many numbers are drawn whatever the conditions say: one seed, one sequence."""
        drawn = {name: domain.draw(random) for name, domain in self.domains.items()}
        return self.used(drawn)

    def suggest(self, trial: Any) -> dict[str, Any]:
        """Parameters that an Optuna trial chooses, one by one: those without use are never asked for."""
        chosen: dict[str, Any] = {}
        for name, domain in self.domains.items():
            if self._holds(domain, chosen):
                chosen[name] = domain.suggest(trial, name)
        return chosen

    def grid(self, points: int) -> list[dict[str, Any]]:
        """Every combination, those that differ only in what is not used just once."""
        names = list(self.domains)
        axes = [domain.grid(points) for domain in self.domains.values()]
        found: dict[str, dict[str, Any]] = {}
        for values in itertools.product(*axes):
            parameters = self.used(dict(zip(names, values)))
            found.setdefault(repr(parameters), parameters)
        return list(found.values())

    def used(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters whose conditions hold."""
        kept: dict[str, Any] = {}
        for name, domain in self.domains.items():
            if name in parameters and self._holds(domain, kept):
                kept[name] = parameters[name]
        return kept

    def inside(self, parameters: Mapping[str, Any], random: np.random.Generator) -> dict[str, Any]:
        """Parameters brought back into their ranges; those that are used now and were not before are drawn."""
        whole = {
            name: domain.nearest(parameters[name]) if name in parameters else domain.draw(random)
            for name, domain in self.domains.items()
        }
        return self.used(whole)

    def check(self, base: Config) -> None:
        """Refuse values of the wrong type, and a space of which no combination is a config."""
        random = np.random.default_rng(0)
        for name, domain in self.domains.items():
            for value in domain.extremes():
                problem = _refused(base, {name: value})
                if not problem.startswith(name):
                    continue
                # It may be right beside other values of the space: gradient_accumulation=128 beside batch_size=256.
                if all(_refused(base, {**self.draw(random), name: value}) for _ in range(_PROBES)):
                    raise ConfigError(f"the space: {problem}")
        problems = [_refused(base, self.draw(random)) for _ in range(_PROBES)]
        if all(problems):
            raise ConfigError(f"the space: no combination of {_PROBES} drawn from it can be trained: {problems[0]}")

    def _holds(self, domain: Domain, parameters: Mapping[str, Any]) -> bool:
        return all(
            (parameters[name] if name in parameters else None if name in self.domains else self.fixed.get(name))
            in wanted
            for name, wanted in domain.when.items()
        )


def _opened(written: Mapping[str, Any], prefix: str = "", whole: Container[str] = ()) -> Iterator[tuple[str, Any]]:
    """Dotted names and their values: sections inside each other (as the command line makes them) are opened.

    `whole`: names that are none of a section.
    """
    for key, value in written.items():
        name = f"{prefix}{key}"
        section = isinstance(value, Mapping) and value and not is_domain(value) and "grid_search" not in value
        if section and name not in whole and not any(map(_scalar, value.values())):
            yield from _opened(value, f"{name}.", whole)
        else:
            yield name, value


def _scalar(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _setting(name: str) -> str:
    """The name of a setting that can be searched."""
    name = resolve_alias(name)
    try:
        check_key(name)
    except ConfigError as error:
        raise ConfigError(f"the space: {error}") from None
    if name.split(".")[0] in _NOT_SEARCHED:
        raise ConfigError(f"the space: {name} says where or how a run is kept: it is the same for all trials")
    return name


def _looked_at(domains: Mapping[str, Domain], base: Config | Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the config that conditions look at."""
    fixed: dict[str, Any] = {}
    for name, domain in domains.items():
        for other in domain.when:
            if other in domains:
                continue
            if isinstance(base, Config):
                try:
                    check_key(resolve_alias(other))
                except ConfigError as error:
                    raise ConfigError(f"the space: {name}: when: {error}") from None
            elif other not in base:
                raise ConfigError(f"the space: {name}: when: {other} is none of the parameters ({', '.join(domains)})")
            fixed[other] = base.get(other)
    return fixed


def _in_order(domains: Mapping[str, Domain]) -> dict[str, Domain]:
    """Each parameter after those that it depends on; else as they were written."""
    ordered: dict[str, Domain] = {}
    waiting = dict(domains)
    while waiting:
        ready = [n for n, domain in waiting.items() if not any(other in waiting for other in domain.when)]
        if not ready:
            raise ConfigError(f"the space: the conditions of {', '.join(waiting)} go round in a circle")
        ordered[ready[0]] = waiting.pop(ready[0])
    return ordered


def _refused(base: Config, parameters: Mapping[str, Any]) -> str:
    """What is wrong with the config that these parameters make; nothing if nothing."""
    sections: dict[str, dict[str, Any]] = {}  # only those that change: a whole Config takes far longer
    for key, value in parameters.items():
        name, *path = key.split(".")
        here = sections.setdefault(name, dataclasses.asdict(getattr(base, name)))
        for part in path[:-1]:
            here = here.setdefault(part, {})
        here[path[-1]] = value
    try:
        for name, values in sections.items():
            section_types()[name](**values)
    except ConfigError as error:
        return str(error)
    return ""
