"""Which trials go on: ASHA ends those that fall behind, population-based training lets them copy those ahead."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from distributed_training.config import ConfigError, TuningConfig
from distributed_training.tuning.domains import Choice, Domain
from distributed_training.tuning.space import Space

_CHANGEABLE = (
    "training.lr",
    "training.momentum",
    "training.weight_decay",
    "training.batch_size",
    "training.gradient_clip",
    "training.gradient_accumulation",
    "data.augment.",
)
"""Settings with which a training can go on from weights that were trained with others."""


@dataclass(frozen=True)
class Length:
    """How far trials go, and in which unit they say so."""

    attribute: str
    """The entry of a report that counts."""
    last: int
    """Its value at the end of a trial that nobody ends."""
    settings: bool
    """Whether parameters are settings of ours, of which only some can change during a training."""


def make_scheduler(tuning: TuningConfig, space: Space, length: Length) -> Any:
    """The scheduler that `tuning.scheduler` names, for Ray; None lets every trial train to its end."""
    make = SCHEDULERS[tuning.scheduler]
    return make(tuning, space, length) if make is not None else None


def _asha(tuning: TuningConfig, space: Space, length: Length) -> Any:
    from ray.tune.schedulers import ASHAScheduler

    # One more than the last: what comes to its end by itself is not to be ended.
    return ASHAScheduler(
        time_attr=length.attribute,
        max_t=length.last + 1,
        grace_period=min(tuning.grace_epochs, length.last),
        reduction_factor=tuning.reduction,
    )


def _pbt(tuning: TuningConfig, space: Space, length: Length) -> Any:
    from ray.tune.schedulers import PopulationBasedTraining

    changed = {
        name: domain for name, domain in space.domains.items() if not length.settings or name.startswith(_CHANGEABLE)
    }
    if not changed:
        raise ConfigError(
            "tuning.scheduler=pbt changes settings during training, and the space has none that can be changed: "
            f"{', '.join(name.rstrip('.') for name in _CHANGEABLE)}"
        )
    return PopulationBasedTraining(
        time_attr=length.attribute,
        perturbation_interval=tuning.perturb_epochs,
        hyperparam_mutations={name: _mutation(domain) for name, domain in changed.items()},
        custom_explore_fn=functools.partial(_inside, changed),
        log_config=False,
        synch=True,  # else short trials are over before there is anybody to compare them with
    )


def _mutation(domain: Domain) -> Any:
    return list(domain.values) if isinstance(domain, Choice) else functools.partial(_draw, domain)


def _draw(domain: Domain) -> Any:
    return domain.draw(np.random.default_rng())


def _inside(domains: dict[str, Domain], parameters: dict[str, Any]) -> dict[str, Any]:
    """Changed parameters back in their ranges: Ray multiplies, and knows of none."""
    return {name: domains[name].nearest(value) if name in domains else value for name, value in parameters.items()}


SCHEDULERS: dict[str, Callable[[TuningConfig, Space, Length], Any] | None] = {"asha": _asha, "pbt": _pbt, "none": None}
