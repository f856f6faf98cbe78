"""Seeds: the same seed gives the same draws, and the state of every generator survives a round trip."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from distributed_training.data.randomness import global_generators_kept
from distributed_training.runtime.seeds import generators_state, restore_generators, seed_everything, seed_torch


@pytest.fixture(autouse=True)
def _generators_as_before() -> Iterator[None]:
    with global_generators_kept():
        yield


def draw() -> list[float]:
    # Gaussians come in pairs of which the second is kept: an odd number leaves one over.
    python = [random.random(), random.gauss(0, 1)]
    numpy = [float(np.random.rand()), float(np.random.randn())]
    return [*python, *numpy, *torch.rand(2).tolist(), *torch.randn(3).tolist()]


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 + 5, 2**63])
def test_a_seed_gives_the_same_draws(seed: int) -> None:
    seed_everything(seed)
    first = draw()
    seed_everything(seed)
    assert draw() == first
    seed_everything(seed + 1)
    assert all(a != b for a, b in zip(draw(), first))


def test_seed_torch_seeds_torch_alone() -> None:
    seed_everything(0)
    python, numpy = random.getstate(), np.random.get_state()[1].tolist()
    seed_torch(2**64 - 1, torch.device("cpu"))
    first = torch.rand(3)
    seed_torch(2**64 - 1, torch.device("cpu"))
    assert torch.equal(torch.rand(3), first)
    assert random.getstate() == python
    assert np.random.get_state()[1].tolist() == numpy


@pytest.mark.parametrize(("device", "index"), [("cuda", 1), ("cuda:0", 0)])
def test_seed_torch_seeds_one_gpu(monkeypatch: pytest.MonkeyPatch, device: str, index: int) -> None:
    gpus = (torch.Generator(), torch.Generator())
    monkeypatch.setattr(torch.cuda, "default_generators", gpus)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    before = gpus[1 - index].get_state()
    seed_torch(77, torch.device(device))
    assert gpus[index].initial_seed() == 77
    assert torch.equal(gpus[1 - index].get_state(), before)


class TestState:
    def test_draws_go_on_from_where_the_state_was_taken(self) -> None:
        seed_everything(3)
        draw()
        state = generators_state()
        expected = draw() + draw()
        restore_generators(state)
        assert draw() + draw() == expected

    def test_holds_only_what_a_checkpoint_may_hold(self) -> None:
        seed_everything(4)
        draw()
        file = io.BytesIO()
        torch.save(generators_state(), file)
        expected = draw()
        file.seek(0)
        restore_generators(torch.load(file, weights_only=True))
        assert draw() == expected

    def test_is_a_copy_that_later_draws_do_not_change(self) -> None:
        seed_everything(5)
        state = generators_state()
        expected = draw()
        restore_generators(state)
        draw(), draw()
        restore_generators(state)
        assert draw() == expected

    def test_of_gpus_is_kept_and_restored_as_far_as_there_are_gpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        restored: dict[int, Any] = {}
        states = [torch.zeros(2, dtype=torch.uint8), torch.ones(2, dtype=torch.uint8)]
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: states)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "set_rng_state", lambda value, index: restored.update({index: value}))
        state = generators_state()
        assert len(state["cuda"]) == 2
        restore_generators(state)
        assert list(restored) == [0]
        del state["cuda"]
        restore_generators(state)
