"""Randomness keyed by sample: the global generators, seeded for one sample and then as if untouched."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from distributed_training.data.randomness import global_generators_kept, seed_for_sample


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def state() -> tuple[Any, ...]:
    numpy = np.random.get_state()
    return random.getstate(), numpy[1].tolist(), numpy[2:], torch.get_rng_state().tolist()


def keyed(key: int, sample: int) -> tuple[float, float, float]:
    with global_generators_kept():
        seed_for_sample(key, sample)
        return draw()


def test_generators_go_on_as_if_nothing_had_happened() -> None:
    before = state()
    with global_generators_kept():
        draw()
        seed_for_sample(1, 2)
        draw()
    assert state() == before


def test_generators_are_put_back_after_an_error_too() -> None:
    before = state()
    with pytest.raises(ZeroDivisionError), global_generators_kept():
        random.seed(1 / (draw() is None))
    assert state() == before


def test_a_half_used_pair_of_gaussians_is_put_back() -> None:
    with global_generators_kept():
        random.seed(1), np.random.seed(1)
        random.gauss(0, 1), np.random.randn()
        before = state()
        with global_generators_kept():
            random.gauss(0, 1), np.random.randn()
        assert state() == before


def test_a_sample_always_draws_the_same() -> None:
    first = keyed(5, 7)
    random.random()
    assert keyed(5, 7) == first


def test_samples_and_keys_draw_differently() -> None:
    drawn = [keyed(key, sample) for key in (0, 1, 2**64 - 1) for sample in range(10)]
    for generator in zip(*drawn):
        assert len(set(generator)) == 30


def test_returns_a_seed_of_64_bits() -> None:
    with global_generators_kept():
        seeds = [seed_for_sample(3, sample) for sample in range(100)]
    assert len(set(seeds)) == 100
    assert max(seeds) > 2**62
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_seeds_never_change() -> None:
    """Users' augmentation depends on them: they change only together with PLAN_VERSION."""
    with global_generators_kept():
        assert [seed_for_sample(0, 0), seed_for_sample(1, 2)] == [12035550249420947055, 16171810823986729605]
