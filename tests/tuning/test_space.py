"""Spaces: what they give at random, to Optuna and to a grid, and what is refused before anything starts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from distributed_training.config import Config, ConfigError
from distributed_training.config.load import load_config
from distributed_training.tuning import get_default_search_space
from distributed_training.tuning.parameters import Parameters
from distributed_training.tuning.space import Space

SPACE = {
    "training.lr": {"loguniform": [1e-4, 1e-1]},
    "training.batch_size": {"choice": [32, 64]},
    "model.args.hidden": {"int": [16, 256], "log": True},
    "training.optimizer": {"choice": ["sgd", "adamw"]},
    "training.momentum": {"uniform": [0.5, 0.99], "when": {"training.optimizer": "sgd"}},
}


def read(space: dict[str, Any], base: Any = None) -> Space:
    return Space.read(space, Config() if base is None else base)


def test_values_are_in_their_ranges_and_conditions_hold() -> None:
    space, random = read(SPACE), np.random.default_rng(0)
    drawn = [space.draw(random) for _ in range(200)]
    assert all(1e-4 <= d["training.lr"] <= 1e-1 for d in drawn)
    assert {d["training.batch_size"] for d in drawn} == {32, 64}
    assert all(isinstance(d["model.args.hidden"], int) and 16 <= d["model.args.hidden"] <= 256 for d in drawn)
    assert all(("training.momentum" in d) == (d["training.optimizer"] == "sgd") for d in drawn)
    below = sum(d["training.lr"] < 3.16e-3 for d in drawn)  # the middle of the range, on a logarithmic scale
    assert 70 < below < 130


def test_the_same_seed_gives_the_same_sequence() -> None:
    space = read(SPACE)
    one, two = ([space.draw(random) for _ in range(5)] for random in map(np.random.default_rng, (3, 3)))
    assert one == two


def test_a_condition_may_look_at_a_setting_that_is_not_searched_and_stand_before_what_it_looks_at() -> None:
    sgd = Config.from_dict({"training": {"optimizer": "sgd"}})
    condition = {"training.momentum": {"uniform": [0.5, 0.9], "when": {"training.optimizer": ["sgd"]}}}
    assert "training.momentum" in read(condition, sgd).draw(np.random.default_rng(0))
    assert read(condition).draw(np.random.default_rng(0)) == {}
    turned = {**condition, "training.optimizer": {"choice": ["sgd"]}}
    assert read(turned).draw(np.random.default_rng(0)).keys() == {"training.optimizer", "training.momentum"}


def test_a_grid_has_every_combination_once() -> None:
    space = {
        "training.optimizer": {"choice": ["sgd", "adamw"]},
        "training.momentum": {"uniform": [0.5, 0.9], "points": 3, "when": {"training.optimizer": "sgd"}},
        "training.weight_decay": {"loguniform": [1e-4, 1e-2]},
        "training.batch_size": {"int": [32, 96], "step": 32},
    }
    points = read(space).grid(2)
    assert len(points) == (3 + 1) * 2 * 3
    assert sorted({p["training.momentum"] for p in points if "training.momentum" in p}) == [0.5, 0.7, 0.9]
    assert {p["training.batch_size"] for p in points} == {32, 64, 96}


def test_optuna_is_asked_only_for_what_is_used() -> None:
    optuna = pytest.importorskip("optuna")
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    space = read({**SPACE, "model.args.hidden": {"choice": [[32], [64, 64]]}})
    for _ in range(20):
        trial = study.ask()
        chosen = space.suggest(trial)
        assert ("training.momentum" in trial.params) == (chosen["training.optimizer"] == "sgd")
        assert chosen["model.args.hidden"] in ([32], [64, 64])
        study.tell(trial, 0.0)


def test_the_section_may_be_written_with_dots_or_nested_or_changed_on_the_command_line(in_tmp: Any) -> None:
    (in_tmp / "c.yaml").write_text(
        "tuning: {space: {training.lr: {uniform: [0.1, 0.2]}, model: {args: {hidden: [8, 9]}}}}"
    )
    words = ["tuning.space.training.weight_decay={uniform: [0.0, 0.1]}", "tuning.objectives.val_accuracy=max"]
    config = load_config(in_tmp / "c.yaml", words, environ={})
    space = Space.read(config.tuning.space, config)
    assert set(space.domains) == {"training.lr", "training.weight_decay", "model.args.hidden"}
    assert config.tuning.objectives == {"val_accuracy": "max"}
    assert config.get("tuning.space.training.lr.uniform") == [0.1, 0.2]


def test_the_space_can_be_written_down_and_read_again() -> None:
    space = read({**SPACE, "training.warmup_epochs": {"uniform": [0.0, 1.0], "step": 0.25}})
    again = read(space.described())
    assert again == space


def test_domains_of_ray_are_understood() -> None:
    tune = pytest.importorskip("ray.tune")
    space = read(
        {
            "lr": tune.loguniform(1e-4, 1e-1),
            "width": tune.randint(1, 5),
            "rate": tune.quniform(0.0, 1.0, 0.25),
            "kind": tune.choice(["a", "b"]),
            "depth": tune.grid_search([1, 2]),
        },
        {},
    )
    assert space.described() == {
        "lr": {"loguniform": [1e-4, 1e-1]},
        "width": {"int": [1, 4]},
        "rate": {"uniform": [0.0, 1.0], "step": 0.25},
        "kind": {"choice": ["a", "b"]},
        "depth": {"choice": [1, 2]},
    }


def test_the_default_space_fits_the_default_config() -> None:
    assert "training.lr" in read(get_default_search_space()).domains


def test_a_function_finds_parameters_by_short_names() -> None:
    given = Parameters({"training.lr": 0.1, "width": 3})
    assert given["lr"] == given["learning_rate"] == given["training.lr"] == 0.1
    assert given["width"] == 3
    assert given.get("momentum", 0.9) == 0.9
    with pytest.raises(KeyError, match="depth"):
        given["depth"]


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({}, "space is empty"),
        ({"training.lrr": {"uniform": [0, 1]}}, r"unknown setting training\.lrr; did you mean training\.lr\?"),
        ({"run.root": {"choice": ["a", "b"]}}, "the same for all trials"),
        ({"training.lr": {"uniform": [0.1, 0.1]}}, "is empty"),
        ({"training.lr": {"uniform": [0.2, 0.1]}}, r"lowest value is above the highest"),
        ({"training.lr": {"loguniform": [0, 0.1]}}, "must begin above 0"),
        ({"training.lr": {"uniform": [0.1]}}, "is no range"),
        ({"training.lr": {"uniform": ["a", "b"]}}, "is no range"),
        ({"training.lr": {"uniform": [0.1, float("inf")]}}, "no end"),
        ({"training.lr": {"choice": []}}, "choice of nothing"),
        ({"training.lr": {"gaussian": [0, 1]}}, "one of uniform"),
        ({"training.lr": {"uniform": [0.1, 1], "logg": True}}, "logg is no option"),
        ({"training.lr": 0.1}, "says no values"),
        ({"training.batch_size": {"int": [1.5, 4]}}, "must be whole"),
        ({"training.batch_size": {"uniform": [32.5, 33.5]}}, "whole number"),
        ({"training.momentum": {"uniform": [0.5, 1.5]}}, r"training\.momentum=1\.5 must be between"),
        ({"training.optimizer": {"choice": ["adamw", "lion"]}}, "must be one of"),
        (
            {"training.lr": {"uniform": [0.1, 1], "when": {"training.optimizr": "sgd"}}},
            "did you mean training.optimizer",
        ),
        ({"training.lr": {"uniform": [0.1, 1], "step": 2}}, "step=2"),
        (
            {
                "training.lr": {"uniform": [0.1, 1], "when": {"training.momentum": 0.5}},
                "training.momentum": {"choice": [0.5], "when": {"training.lr": 0.5}},
            },
            "circle",
        ),
    ],
)
def test_mistakes_are_refused_by_name(space: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(space)


def test_values_that_are_right_only_beside_others_are_not_refused() -> None:
    space = {"training.gradient_accumulation": {"choice": [1, 128]}, "training.batch_size": {"choice": [32, 256]}}
    assert read(space).domains


@pytest.mark.parametrize("text", ["soon", "1x", "0s", "", "1h 2"])
def test_a_time_budget_that_is_none(text: str) -> None:
    if text == "":
        assert Config().replace(**{"tuning.time_budget": text}).tuning.time_budget is None
        return
    with pytest.raises(ConfigError, match="time_budget"):
        Config.from_dict({"tuning": {"time_budget": text}})
