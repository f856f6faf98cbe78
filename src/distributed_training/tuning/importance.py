"""How much each parameter mattered in a search.

Where every trial has every parameter it is fANOVA, as Optuna computes it: the share of the variance of a random forest
that a parameter explains by itself, over the whole space. Parameters that some trials do not have (a momentum that
only SGD takes) fANOVA cannot take; then it is permutation importance: how much worse a random forest predicts trials
that it has not seen when a parameter's values are exchanged among them, where `not set` is a value as well.

Both describe the trials that were run: a searcher that soon leaves a bad region sees little of it.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from distributed_training.runtime.errors import MissingDependencyError
from distributed_training.runtime.imports import require
from distributed_training.tuning.axes import Axis, axes_of
from distributed_training.tuning.records import Search, Trial
from distributed_training.tuning.standings import within_reach

FEWEST = 10  # trials below which a forest only repeats chance
RELIABLE = 20  # trials below which the reader is warned
_PURPOSE = "the importance of parameters"
_TREES = 64
_MIXED = 10  # exchanges of each parameter's values


@dataclass(frozen=True)
class Importance:
    """Shares of all parameters, which sum to 1; or why there are none."""

    method: str = ""
    """How the shares were found."""
    shares: dict[str, float] = field(default_factory=dict)
    """Parameter and share, the largest first."""
    note: str = ""
    """What the reader must know: too few trials, nothing to explain, a library that is missing."""


def importance(search: Search, trials: Sequence[Trial], metric: str | None = None) -> Importance:
    """The importance of every parameter for an objective, the first one unless another is named."""
    metric = metric or search.metric
    values = [(trial, trial.value(metric)) for trial in trials if trial.status != "failed"]
    known = [(trial, value) for trial, value in values if value is not None]
    axes = axes_of(search, [trial for trial, _ in known])
    if len(known) < FEWEST:
        return Importance(note=f"needs at least {FEWEST} trials with a {metric}; there are {len(known)}")
    if not axes:
        return Importance(note="no parameter took more than one value")
    scores = [value for _, value in known]
    if max(scores) - min(scores) <= 1e-12 * max(map(abs, scores)):
        return Importance(note=f"all trials have the same {metric}: there is nothing to explain")
    places = [[axis.place(trial.parameters.get(axis.key)) for axis in axes] for trial, _ in known]
    scores = within_reach(scores, search.objectives.get(metric, "min"))
    if len(axes) == 1:
        return Importance("the only parameter", {axes[0].key: 1.0})
    try:
        method, shares = _shares(axes, places, scores)
    except MissingDependencyError as error:
        return Importance(note=str(error))
    total = sum(shares.values())
    if not total > 0:
        return Importance(note=f"no parameter explains the differences in {metric} between these {len(known)} trials")
    shares = {key: share / total for key, share in sorted(shares.items(), key=lambda item: -item[1])}
    note = f"only {len(known)} trials: take it as a hint" if len(known) < RELIABLE else ""
    return Importance(f"{method}, {len(known)} trials", shares, note)


def _shares(
    axes: Sequence[Axis], places: Sequence[Sequence[float | None]], scores: Sequence[float]
) -> tuple[str, dict[str, float]]:
    """The method that can be used here, and what it finds."""
    if any(place is None for row in places for place in row):
        return "permutation importance (some parameters have a condition)", _permuted(axes, places, scores)
    if importlib.util.find_spec("optuna") is None:
        return "permutation importance (Optuna is not installed)", _permuted(axes, places, scores)
    return "fANOVA (Optuna)", _fanova(axes, places, scores)


def _fanova(
    axes: Sequence[Axis], places: Sequence[Sequence[float | None]], scores: Sequence[float]
) -> dict[str, float]:
    optuna: Any = require("optuna", "ray", _PURPOSE)
    require("sklearn", "ray", _PURPOSE)  # which Optuna needs for it
    # On the unit interval of each axis: a logarithmic range is even there, and Optuna needs to know no more.
    kinds = {
        axis.key: optuna.distributions.CategoricalDistribution(axis.names)
        if axis.names
        else optuna.distributions.FloatDistribution(0.0, 1.0)
        for axis in axes
    }
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        study = optuna.create_study()
        for row, score in zip(places, scores):
            values = {axis.key: _native(axis, place) for axis, place in zip(axes, row)}
            study.add_trial(optuna.trial.create_trial(params=values, distributions=kinds, value=score))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the libraries among themselves
            evaluator = optuna.importance.FanovaImportanceEvaluator(n_trees=_TREES, seed=0)
            found = optuna.importance.get_param_importances(study, evaluator=evaluator, normalize=False)
    finally:
        optuna.logging.set_verbosity(before)
    return {axis.key: _finite(found.get(axis.key, 0.0)) for axis in axes}


def _permuted(
    axes: Sequence[Axis], places: Sequence[Sequence[float | None]], scores: Sequence[float]
) -> dict[str, float]:
    """Mean loss of accuracy over folds, all columns of a parameter exchanged together."""
    require("sklearn", "ray", _PURPOSE)
    import numpy as np
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.model_selection import KFold

    columns = [_columns(axis, [row[i] for row in places]) for i, axis in enumerate(axes)]
    ends = np.cumsum([len(block) for block in columns])
    inputs = np.asarray([column for block in columns for column in block]).T
    targets = np.asarray(scores)
    random = np.random.default_rng(0)
    losses = np.zeros(len(axes))
    for fitted, held in KFold(n_splits=min(5, len(scores)), shuffle=True, random_state=0).split(inputs):
        forest = RandomForestRegressor(n_estimators=_TREES, random_state=0).fit(inputs[fitted], targets[fitted])
        mixed = np.tile(inputs[held], (1 + _MIXED * len(axes), 1)).reshape(-1, len(held), inputs.shape[1])
        for i, end in enumerate(ends):  # the first block stays as it is
            columns_of_it = slice(end - len(columns[i]), end)
            for block in range(1 + _MIXED * i, 1 + _MIXED * (i + 1)):
                others = random.integers(len(inputs), size=len(held))
                mixed[block, :, columns_of_it] = inputs[others, columns_of_it]
        guesses = forest.predict(mixed.reshape(-1, inputs.shape[1])).reshape(-1, len(held))  # all at once: one pass
        errors = np.square(guesses - targets[held]).mean(axis=1)
        losses += errors[1:].reshape(len(axes), _MIXED).mean(axis=1) - errors[0]
    return {axis.key: max(0.0, _finite(loss)) for axis, loss in zip(axes, losses)}


def _columns(axis: Axis, places: Sequence[float | None]) -> list[list[float]]:
    """A parameter as columns of numbers: one for each name, and one that says whether it was set at all."""
    missing = [float(place is None) for place in places]
    if axis.names:
        chosen = [None if place is None else int(place * len(axis.names)) for place in places]
        found = [[float(choice == name) for choice in chosen] for name in range(len(axis.names))]
    else:
        found = [[0.5 if place is None else place for place in places]]
    return [*found, missing] if any(missing) else found


def _native(axis: Axis, place: float | None) -> Any:
    assert place is not None
    return axis.names[int(place * len(axis.names))] if axis.names else place


def _finite(value: float) -> float:
    return float(value) if math.isfinite(value) else 0.0
