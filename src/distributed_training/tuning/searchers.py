"""Where the parameters of a search come from: at random, over a grid, or from Optuna by what earlier trials gave."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from distributed_training.config import TuningConfig
from distributed_training.runtime.imports import require
from distributed_training.tuning.space import Space

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Suggestions:
    """A searcher for Ray, and how many trials it is good for."""

    searcher: Any
    trials: int
    param_space: dict[str, Any] | None = None
    """What Ray calls so: names and how to draw their values, for searchers that leave that to Ray."""


def make_searcher(tuning: TuningConfig, space: Space, objectives: Mapping[str, str]) -> Suggestions:
    """The searcher that `tuning.algorithm` names. The same seed makes the same suggestions."""
    if tuning.scheduler == "pbt":
        return _population(tuning, space)
    return SEARCHERS[tuning.algorithm](tuning, space, objectives)


def _population(tuning: TuningConfig, space: Space) -> Suggestions:
    """What a population begins with. It goes on by itself: Ray takes no searcher beside it."""
    from ray.tune.search import BasicVariantGenerator

    random = np.random.default_rng(tuning.seed)
    grid = tuning.algorithm == "grid"
    members = space.grid(tuning.grid_points) if grid else [space.draw(random) for _ in range(tuning.samples)]
    # What a member does not use, Ray draws: it may come to use it.
    drawn = {name: domain.for_ray() for name, domain in space.domains.items()}
    return Suggestions(BasicVariantGenerator(points_to_evaluate=members), len(members), drawn)


def _random(tuning: TuningConfig, space: Space, objectives: Mapping[str, str]) -> Suggestions:
    from distributed_training.tuning.planned import Planned

    random = np.random.default_rng(tuning.seed)
    return Suggestions(Planned([space.draw(random) for _ in range(tuning.samples)]), tuning.samples)


def _grid(tuning: TuningConfig, space: Space, objectives: Mapping[str, str]) -> Suggestions:
    from distributed_training.tuning.planned import Planned

    points = space.grid(tuning.grid_points)
    if len(points) != tuning.samples:
        logger.info("the grid has %d points, and each is a trial (tuning.samples does not count here)", len(points))
    return Suggestions(Planned(points), len(points))


def _bayesian(tuning: TuningConfig, space: Space, objectives: Mapping[str, str]) -> Suggestions:
    optuna = require("optuna", "ray", "tuning.algorithm=bayesian")
    from ray.tune.search.optuna import OptunaSearch

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    several = len(objectives) > 1
    searcher = OptunaSearch(
        space=space.suggest,
        metric=list(objectives) if several else next(iter(objectives)),
        mode=list(objectives.values()) if several else next(iter(objectives.values())),
        sampler=optuna.samplers.TPESampler(seed=tuning.seed),
    )
    return Suggestions(searcher, tuning.samples)


SEARCHERS: dict[str, Callable[[TuningConfig, Space, Mapping[str, str]], Suggestions]] = {
    "random": _random,
    "grid": _grid,
    "bayesian": _bayesian,
}
