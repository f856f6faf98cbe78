"""What mattered is found, with and without conditions, and chance is called chance."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tests.tuning.searches import make_search

from distributed_training.runtime import imports
from distributed_training.runtime.errors import MissingDependencyError
from distributed_training.tuning.importance import importance
from distributed_training.tuning.records import Search, Trial

pytest.importorskip("sklearn")
pytest.importorskip("optuna")


def search(**space: Any) -> Search:
    return Search(name="s", objectives={"loss": "min"}, space=space)


def trial(number: int, value: float, **parameters: Any) -> Trial:
    return Trial(str(number), parameters, "completed", last={"loss": value}, best={"loss": value})


def test_fanova_finds_the_one_that_matters() -> None:
    chance = random.Random(0)
    space = {"x": {"uniform": [0, 1]}, "kind": {"choice": ["a", "b"]}, "noise": {"loguniform": [1e-5, 1]}}
    trials = []
    for n in range(40):
        x, kind = chance.random(), chance.choice("ab")
        trials.append(trial(n, 10 * x + (kind == "b"), x=x, kind=kind, noise=10 ** chance.uniform(-5, 0)))
    found = importance(search(**space), trials)
    assert "fANOVA" in found.method
    assert next(iter(found.shares)) == "x"
    assert found.shares["x"] > 0.7 > 0.2 > found.shares["noise"]
    assert sum(found.shares.values()) == pytest.approx(1)
    assert not found.note
    assert importance(search(**space), trials) == found  # the same every time


def test_one_diverged_trial_is_not_all_there_is() -> None:
    chance = random.Random(1)
    space = {"x": {"uniform": [0, 1]}, "noise": {"uniform": [0, 1]}}
    trials = [trial(n, x, x=x, noise=chance.random()) for n, x in enumerate(chance.random() for _ in range(30))]
    trials.append(trial(99, 1e12, x=0.5, noise=0.999))
    assert importance(search(**space), trials).shares["x"] > 0.7


def test_conditions_are_handled_and_the_method_is_named(tmp_path: Path) -> None:
    place = make_search(tmp_path, 60)
    found = importance(place.load(), place.trials())
    assert "permutation" in found.method
    assert "condition" in found.method
    assert next(iter(found.shares)) == "training.lr"
    assert found.shares["training.lr"] > 0.6
    assert set(found.shares) == set(place.load().space)


@pytest.mark.parametrize(
    ("trials", "said"),
    [
        ([trial(n, n, x=n / 9) for n in range(5)], "at least 10 trials"),
        ([trial(n, 1.0, x=n / 9, y=n % 3) for n in range(11)], "same loss"),
        ([trial(n, n, x=0.5) for n in range(11)], "more than one value"),
        ([Trial(str(n), {"x": n / 9}, "failed", error="oh") for n in range(10)], "there are 0"),
    ],
)
def test_where_nothing_can_be_said_it_says_why(trials: list[Trial], said: str) -> None:
    found = importance(search(), trials)
    assert said in found.note
    assert not found.shares


def test_few_trials_are_a_hint_only() -> None:
    trials = [trial(n, n, x=n / 11, y=(n * 7 % 12) / 11) for n in range(12)]
    assert "only 12 trials" in importance(search(), trials).note


def test_a_missing_library_is_named_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(module: str, extra: str, purpose: str, note: str = "") -> None:
        raise MissingDependencyError(f"{purpose} needs {module}: pip install 'distributed-training[{extra}]'")

    monkeypatch.setattr("distributed_training.tuning.importance.require", missing)
    assert imports.require is not missing
    found = importance(search(), [trial(n, n, x=n / 11, y=(n * 7 % 12) / 11) for n in range(12)])
    assert "pip install" in found.note
