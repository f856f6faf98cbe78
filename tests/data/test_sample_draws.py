"""What is random in a sample, by whatever generator: a function of (key, sample), however few are seeded."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.contract.dataset import assert_equal
from tests.data.test_torch_dataset import Squares

from distributed_training.data import generator_states, randomness
from distributed_training.data.arrays import ArrayDataset
from distributed_training.data.collating import collate_samples
from distributed_training.data.randomness import global_generators_kept
from distributed_training.data.torch_dataset import (
    PreprocessedDataset,
    TorchDataset,
)
from distributed_training.runtime.errors import DataError


class Rarely(Squares):
    """Random in one sample of many, from one generator; or drawn elsewhere, with a seed that it asks for."""

    def __init__(self, how: str) -> None:
        super().__init__(40)
        self.how = how

    def __getitem__(self, sample: int) -> Any:
        value = 0.0
        if sample == 33:
            if self.how == "seed":
                value = float(np.random.default_rng(torch.initial_seed()).random())
            elif self.how == "undone":
                with torch.random.fork_rng(devices=[]):
                    value = float(torch.rand(1))
            elif self.how == "copied":
                value = self.from_copies()
            else:
                draws: dict[str, Any] = {"random": random.random, "numpy": np.random.rand, "torch": torch.rand}
                value = float(draws[self.how](*[1] * (self.how == "torch")))
        return torch.tensor([sample, value], dtype=torch.float64), sample % 2

    @staticmethod
    def from_copies() -> float:
        mine, numpys = random.Random(), np.random.RandomState()
        mine.setstate(random.getstate())
        numpys.set_state(np.random.get_state())
        return mine.random() + float(numpys.random_sample())


@pytest.fixture
def _only_loading(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that does nothing but load."""
    monkeypatch.setattr(randomness, "_twins", None)
    with global_generators_kept():
        randomness.claim_generators()
        yield
    randomness._notice_looks(-1)


def by_hand(samples: Any, ids: np.ndarray, key: int) -> Any:
    """Every generator seeded for every sample."""
    rows = []
    with global_generators_kept():
        for sample in ids.tolist():
            randomness.seed_for_sample(key, sample)
            rows.append(samples[sample])
    return collate_samples(rows)


@pytest.fixture(params=["training", "only loading"])
def _process(request: pytest.FixtureRequest) -> None:
    """A process that needs its generators for other things too, and one that does not."""
    if request.param == "only loading":
        request.getfixturevalue("_only_loading")


HOW = ["random", "numpy", "torch", "seed", "undone", "copied"]


@pytest.mark.usefixtures("_process")
class TestWhatIsSeeded:
    @pytest.mark.parametrize("how", HOW)
    def test_a_draw_in_one_sample_of_many_is_noticed(self, how: str) -> None:
        dataset, plain = TorchDataset(Rarely(how)), TorchDataset(Squares(40))
        for ids in np.arange(40).reshape(4, 10):
            assert_equal(dataset.fetch_keyed(ids, 5), by_hand(Rarely(how), ids, 5))
            assert dataset.drew == (33 in ids)
            assert_equal(plain.fetch_keyed(ids, 5), by_hand(Squares(40), ids, 5))
            assert not plain.drew
        assert not any(dataset._draws.seeded), "one batch is no sign that the others draw"

    @pytest.mark.parametrize("how", HOW[:3])
    def test_only_what_is_drawn_from_is_seeded(self, how: str) -> None:
        draw = {"random": random.random, "numpy": np.random.standard_normal, "torch": lambda: torch.rand(()).item()}[
            how
        ]
        asked = []

        class Drawing(Squares):
            def __getitem__(self, sample: int) -> Any:
                asked.append(sample)
                return torch.tensor([float(sample), draw()], dtype=torch.float64)

        dataset, batches = TorchDataset(Drawing(40)), np.random.default_rng(0).permutation(40).reshape(8, 5)
        for key in (3, 2**64 - 1):
            for ids in batches:
                asked.clear()
                found = dataset.fetch_keyed(ids, key)
                assert asked == ids.tolist(), "samples that always draw are never loaded twice"
                assert_equal(found, by_hand(Drawing(40), ids, key))
                assert dataset.drew
        assert dataset._draws.seeded == tuple(how == name for name in HOW[:3])

    def test_a_generator_that_is_drawn_from_late_is_noticed(self) -> None:
        class Late(Squares):
            def __getitem__(self, sample: int) -> Any:
                return torch.rand(2), random.random() if sample >= 20 else 0.0

        dataset = TorchDataset(Late(40))
        for ids in np.arange(40).reshape(8, 5):
            assert_equal(dataset.fetch_keyed(ids, 7), by_hand(Late(40), ids, 7))
        assert dataset._draws.seeded == (True, False, True)

    def test_what_the_process_draws_itself_stays_out_of_it(self) -> None:
        """Its own draws go on as if nothing was loaded, and samples do not depend on them."""
        dataset, plain = TorchDataset(Rarely("numpy")), TorchDataset(Squares(40))
        for ids in np.arange(40).reshape(4, 10):
            np.random.standard_normal(), random.gauss(0, 1), torch.rand(1)  # each may have half a pair left over
            before = generator_states.read_states()
            assert_equal(dataset.fetch_keyed(ids, 5), by_hand(Rarely("numpy"), ids, 5))
            assert_equal(plain.fetch_keyed(ids, 5), by_hand(Squares(40), ids, 5))
            if randomness.claimed_generators() is None:
                assert generator_states.different(before, generator_states.read_states()) == randomness.NONE

    def test_a_function_that_changes_what_it_gets_is_given_it_afresh(self) -> None:
        def grow(sample: torch.Tensor) -> torch.Tensor:
            sample += 1
            return sample + (float(np.random.rand()) if sample[0] > 4 else 0.0)

        base = ArrayDataset(torch.arange(8.0)[:, None])
        found = PreprocessedDataset(base, grow).fetch_keyed(np.arange(8), 3)[:, 0]
        assert found[:4].tolist() == [1, 2, 3, 4]
        assert ((found[4:] > torch.arange(5, 9)) & (found[4:] < torch.arange(6, 10))).all()

    def test_nothing_is_left_replaced(self) -> None:
        noticed = randomness.claimed_generators() is not None
        TorchDataset(Squares()).fetch(np.array([1, 2]))
        with pytest.raises(DataError):
            TorchDataset(Squares()).fetch(np.array([1, 99]))
        assert (torch.get_rng_state in randomness._noticed) == noticed
        assert (random.getstate in randomness._noticed) == noticed


@pytest.mark.usefixtures("_only_loading")
def test_a_process_that_only_loads_names_the_sample_that_fails() -> None:
    with pytest.raises(DataError, match="Squares: sample 50"):
        TorchDataset(Squares(40)).fetch_keyed(np.array([1, 2, 50]), 0)
