"""States of the global generators: whatever changes them is seen, and they can be put back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from distributed_training.data import generator_states
from distributed_training.data.generator_states import different, put_back, read_states

ALL = (True, True, True)


@pytest.fixture(autouse=True, params=["by memory", "read every time"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "read every time":
        for seen in (generator_states._python_state, generator_states._numpy_state):
            monkeypatch.setattr(seen, "_memory", None)
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0]), np.random.set_state(before[1]), torch.set_rng_state(before[2])


def draws() -> list[Any]:
    return [random.gauss(0, 1), random.random(), np.random.standard_normal(), np.random.rand(), torch.randn(()).item()]


@pytest.mark.parametrize(
    ("draw", "which"),
    [
        (random.random, 0),
        (lambda: random.gauss(0, 1), 0),
        (lambda: random.shuffle([1, 2, 3]), 0),
        (np.random.rand, 1),
        (np.random.standard_normal, 1),
        (lambda: np.random.permutation(5), 1),
        (lambda: torch.rand(1), 2),
        (lambda: torch.randperm(4), 2),
        (lambda: torch.nn.functional.dropout(torch.ones(3)), 2),
    ],
)
def test_every_draw_is_seen(draw: Any, which: int) -> None:
    for _ in range(3):  # of a pair of gaussians, the second changes nothing else
        before = read_states()
        assert different(before, read_states()) == (False, False, False)
        draw()
        assert different(before, read_states()) == tuple(which == each for each in range(3))


def test_a_whole_round_of_draws_is_seen() -> None:
    """After 624 numbers the place in the table is the same again; the numbers are not."""
    before = read_states()
    for _ in range(312):
        random.random(), np.random.rand()
    torch.empty(624, dtype=torch.int32).random_()
    assert different(before, read_states()) == ALL


def test_all_goes_on_from_where_it_was_read() -> None:
    draws()  # half of each pair of gaussians is left over
    before = read_states()
    expected = draws(), draws()
    put_back(before, ALL)
    assert different(before, read_states()) == (False, False, False)
    assert (draws(), draws()) == expected


def test_only_those_are_put_back_that_are_meant() -> None:
    before = read_states()
    draws()
    put_back(before, (False, True, False))
    assert different(before, read_states()) == (True, False, True)


def test_a_state_with_and_without_half_a_pair_are_told_apart() -> None:
    np.random.standard_normal()
    kept = np.random.get_state()
    with_half = read_states()
    np.random.standard_normal()
    without = read_states()
    np.random.set_state(kept)
    assert different(with_half, read_states()) == (False, False, False)
    assert different(without, read_states()) == (False, True, False)


def test_a_bit_generator_of_somebodys_own_is_read_every_time() -> None:
    own = np.random.RandomState(np.random.PCG64(1))
    one, other = generator_states._numpy_memory(own), generator_states._numpy_memory(own)
    assert one != other
