"""One number for how far two tensors are apart, which rounding keeps small and mistakes do not."""

from __future__ import annotations

import math

import pytest
import torch

from distributed_training.training.difference import differences, relative, typical_size


def difference(reference: list[float], other: list[float], typical: float = 0.0) -> float:
    return differences({"w": torch.tensor(reference)}, {"w": torch.tensor(other)}, typical)["w"]


def test_it_is_the_share_of_the_tensors_own_size() -> None:
    assert difference([3.0, 4.0], [3.0, 4.0]) == 0
    assert difference([3.0, 4.0], [3.0, 4.5]) == pytest.approx(0.1)
    assert difference([300.0, 400.0], [300.0, 450.0]) == pytest.approx(0.1)


def test_a_small_tensor_is_measured_by_the_size_of_the_models_weights() -> None:
    assert difference([1e-6, 0.0], [0.0, 1e-6], typical=0.1) == pytest.approx(1e-5)
    assert difference([1e-6, 0.0], [0.0, 1e-6]) == pytest.approx(math.sqrt(2))


def test_typical_size_is_that_of_the_parameters_named() -> None:
    weights = {"w": torch.full((3,), 2.0), "running_var": torch.full((9,), 100.0), "steps": torch.tensor(7)}
    assert typical_size(weights, ["w", "steps"]) == 2.0
    assert typical_size(weights, []) == 0.0


def test_what_cannot_be_compared_is_infinitely_far() -> None:
    one, two = {"a": torch.zeros(2), "b": torch.zeros(1)}, {"a": torch.zeros(3), "c": torch.zeros(1)}
    assert differences(one, two, 1.0) == {"a": math.inf, "b": math.inf, "c": math.inf}


def test_values_that_are_not_finite_must_be_so_in_both() -> None:
    nan, inf = math.nan, math.inf
    assert difference([nan, inf, 1.0], [nan, inf, 1.0]) == 0
    assert difference([1.0, 1.0], [1.0, nan]) == inf
    assert difference([inf, 1.0], [-inf, 1.0]) == inf
    assert (relative(nan, nan, 1.0), relative(1.0, nan, 1.0), relative(0.0, 0.0, 0.0)) == (0, inf, 0)


def test_counters_and_empty_tensors() -> None:
    one, two = {"n": torch.tensor(10), "e": torch.zeros(0)}, {"n": torch.tensor(9), "e": torch.zeros(0)}
    assert differences(one, two, 50.0) == {"n": pytest.approx(0.1), "e": 0.0}
