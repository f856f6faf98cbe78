"""The sample plan: a true shuffle of any size, cheap at any position, and the same numbers forever."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from distributed_training.data.plan import (
    MAX_SAMPLES,
    PLAN_VERSION,
    Permutation,
    Plan,
    derive_key,
    extend_key,
    hash_ids,
    splitmix64,
)

SIZES = [*range(1, 71), 100, 1023, 1024, 1797, 65535, 65536, 65537, 10**6]
IMPROBABLE = 1e-6  # keys are fixed, so a statistic passes always or never


def order(n: int, key: int) -> np.ndarray:
    return Permutation(n, key)(np.arange(n))


def assert_uniform(counts: Any, freedom: int | None = None, scale: float = 1.0) -> None:
    """Pearson's chi-square against equal expectations, both tails: too even is as suspicious as too uneven."""
    counts = np.asarray(counts, dtype=float).ravel()
    expected = counts.mean()
    assert expected >= 5, "too few draws for a chi-square"
    statistic = scale * float(((counts - expected) ** 2 / expected).sum())
    freedom = len(counts) - 1 if freedom is None else freedom
    assert chi2.sf(statistic, freedom) > IMPROBABLE, f"uneven: {statistic:.1f} with {freedom} degrees of freedom"
    assert chi2.cdf(statistic, freedom) > IMPROBABLE, f"too even: {statistic:.1f} with {freedom} degrees of freedom"


class TestBijection:
    @pytest.mark.parametrize("n", SIZES)
    def test_every_id_comes_exactly_once(self, n: int) -> None:
        for key in (0, 1, 2**64 - 1):
            ids = order(n, key)
            assert ids.dtype == np.int64
            assert np.array_equal(np.sort(ids), np.arange(n))

    @settings(max_examples=80, deadline=None, derandomize=True, database=None)
    @given(n=st.integers(1, 20_000), key=st.integers(0, 2**64 - 1))
    def test_every_id_comes_exactly_once_for_any_size_and_key(self, n: int, key: int) -> None:
        assert np.array_equal(np.sort(order(n, key)), np.arange(n))

    def test_the_largest_size_gives_distinct_ids_in_range(self) -> None:
        positions = np.unique(
            np.concatenate(
                [
                    np.arange(500_000),
                    np.arange(MAX_SAMPLES - 250_000, MAX_SAMPLES),
                    np.random.default_rng(0).integers(0, MAX_SAMPLES, 250_000),
                ]
            )
        )
        ids = Permutation(MAX_SAMPLES, 9)(positions)
        assert len(np.unique(ids)) == len(positions) > 999_000
        assert ids.min() >= 0
        assert ids.max() < MAX_SAMPLES
        assert ids.max() > MAX_SAMPLES * 0.999, "ids reach the whole range"

    @pytest.mark.parametrize("n", [0, -1, MAX_SAMPLES + 1])
    def test_an_impossible_size_is_refused(self, n: int) -> None:
        with pytest.raises(ValueError, match=f"between 1 and 2\\^40 samples, not {n}"):
            Permutation(n, 0)


class TestUniformity:
    @pytest.mark.parametrize(("n", "draws"), [(3, 1200), (4, 2400), (5, 3000)])
    def test_every_order_is_equally_likely(self, n: int, draws: int) -> None:
        seen = Counter(tuple(order(n, derive_key(seed)).tolist()) for seed in range(draws))
        assert set(seen) == set(permutations(range(n))), "odd and even orders both occur"
        assert_uniform(list(seen.values()))

    @pytest.mark.parametrize(("n", "draws"), [(16, 1500), (97, 1500)])
    def test_every_id_is_equally_likely_at_every_position(self, n: int, draws: int) -> None:
        counts = np.zeros((n, n))
        for epoch in range(draws):
            counts[np.arange(n), order(n, derive_key(0, epoch))] += 1
        # Rows and columns have fixed sums, which leaves (n - 1)^2 degrees of freedom and shrinks the statistic.
        assert_uniform(counts, freedom=(n - 1) ** 2, scale=(n - 1) / n)

    @pytest.mark.parametrize("key", [0, 1, derive_key(0, 0)])
    def test_neighbours_are_independent(self, key: int) -> None:
        cells = order(10**6, key) * 32 // 10**6
        for pairs in (cells.reshape(-1, 2), cells[: 10**6 - 64].reshape(-1, 64)[:, [0, 63]]):
            assert_uniform(np.bincount(pairs[:, 0] * 32 + pairs[:, 1], minlength=1024))

    def test_two_epochs_are_independent(self) -> None:
        n = 10**6
        one, other = order(n, derive_key(0, 0)), order(n, derive_key(0, 1))
        assert_uniform(np.bincount((one * 32 // n) * 32 + other * 32 // n, minlength=1024))

    def test_hashed_ids_are_evenly_spread_in_their_high_and_low_bits(self) -> None:
        bits = hash_ids(derive_key(0, 0), np.arange(100_000))
        assert_uniform(np.bincount((bits >> np.uint64(56)).astype(np.int64), minlength=256))
        assert_uniform(np.bincount((bits & np.uint64(255)).astype(np.int64), minlength=256))
        assert len(np.unique(bits)) == len(bits)


class TestLookup:
    @pytest.mark.parametrize("n", [10, 1797, 65537])
    def test_an_id_does_not_depend_on_what_is_looked_up_with_it(self, n: int) -> None:
        permutation = Permutation(n, 3)
        whole = permutation(np.arange(n))
        for size in (1, 7, 64) if n < 5000 else (1000,):
            chunks = [permutation(np.arange(first, min(first + size, n))) for first in range(0, n, size)]
            assert np.array_equal(np.concatenate(chunks), whole)
        some = np.array([n - 1, 0, n // 2, 0])
        assert np.array_equal(permutation(some), whole[some])

    @pytest.mark.parametrize("n", [1, 2, 10, 1023, 1024, 8192, 999_983, 2**26, 2**26 + 1, 10**9])
    def test_an_id_does_not_depend_on_how_many_were_looked_up_before(self, n: int) -> None:
        """Hashes that are looked up in tables, which are made after a while, are those that were computed before."""
        permutation, some = Permutation(n, 5), np.unique(np.linspace(0, n - 1, 50).astype(np.int64))
        first = permutation(some)
        for _ in range(10):
            permutation(np.arange(min(n, 10_000)))
        assert (permutation._tables is None) == (n > 2**26)
        assert np.array_equal(permutation(some), first)

    def test_looking_up_leaves_the_positions_alone(self) -> None:
        positions = np.arange(100)
        Permutation(101, 1)(positions)
        assert np.array_equal(positions, np.arange(100))

    def test_no_positions_give_no_ids(self) -> None:
        assert Permutation(10, 0)(np.array([], dtype=np.int64)).shape == (0,)

    def test_memory_does_not_grow_with_the_dataset(self) -> None:
        plan = Plan(MAX_SAMPLES, 1000, seed=1)
        tracemalloc.start()
        try:
            ids = plan.ids(0, 10**9)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert len(ids) == 1000
        assert peak < 2**20


class TestNumbersNeverChange:
    """These numbers are every user's training. They never change without raising PLAN_VERSION."""

    def test_version(self) -> None:
        assert PLAN_VERSION == 1

    @pytest.mark.parametrize(
        ("n", "key", "first"),
        [
            (1, 0, [0]),
            (2, 0, [0, 1]),
            (10, 0, [4, 1, 0, 6, 2, 3, 7, 8]),
            (10, 1, [6, 4, 7, 8, 9, 1, 5, 0]),
            (97, 123456789, [57, 68, 8, 69, 83, 29, 50, 90]),
            (1023, 7, [495, 713, 406, 563, 590, 845, 138, 645]),
            (1024, 7, [249, 951, 446, 670, 605, 790, 850, 960]),
            (1797, 7, [894, 352, 1574, 166, 1061, 1301, 1645, 1338]),
            (65536, 2**64 - 1, [6919, 37531, 3446, 49099, 18187, 20819, 45241, 35936]),
            (10**6, 42, [475294, 904774, 533097, 743167, 425767, 189927, 616243, 820897]),
            (
                2**40,
                5,
                [
                    59562841728,
                    447219356383,
                    639766135727,
                    672058802985,
                    783666967848,
                    139735531899,
                    929627553708,
                    650195719253,
                ],
            ),
        ],
    )
    def test_orders(self, n: int, key: int, first: list[int]) -> None:
        assert Permutation(n, key)(np.arange(len(first))).tolist() == first

    def test_plan(self) -> None:
        plan = Plan(1797, 64, seed=0)
        assert plan.ids(0, 0)[:8].tolist() == [1709, 1353, 210, 539, 908, 421, 1368, 1066]
        assert plan.ids(3, 0)[:8].tolist() == [1457, 1017, 82, 1116, 1573, 446, 1241, 833]
        assert plan.ids(3, 28).tolist() == [1575, 1229, 1133, 1615, 421]

    def test_keys(self) -> None:
        assert splitmix64(0) == 16294208416658607535  # also the published first output of splitmix64
        assert derive_key() == 1
        assert derive_key(0) == 627405149472732430
        assert derive_key(0, 0) == 18171665359712530786
        assert derive_key(-1) == 7521888212171461645
        assert derive_key(1, 2, 3) == 10406723337962105348

    def test_hashes(self) -> None:
        assert hash_ids(derive_key(0, 0), np.array([0, 1, 2**40])).tolist() == [
            15842366300440096363,
            14194392204815776357,
            12255101179939330745,
        ]


class TestKeys:
    def test_a_key_can_be_made_part_by_part(self) -> None:
        assert extend_key(derive_key(3, 1), 4) == derive_key(3, 1, 4)

    def test_the_order_and_number_of_parts_matter(self) -> None:
        keys = [derive_key(*parts) for parts in ((), (0,), (0, 0), (0, 1), (1, 0), (1,), (-1,), (2**63,))]
        assert len(set(keys)) == len(keys)
        assert all(0 <= key < 2**64 for key in keys)

    def test_a_hash_does_not_depend_on_the_batch(self) -> None:
        together = hash_ids(5, np.arange(100))
        assert [int(hash_ids(5, np.array([n]))[0]) for n in range(100)] == together.tolist()
        assert not np.any(together == hash_ids(6, np.arange(100)))


class TestPlan:
    @pytest.mark.parametrize(
        ("samples", "batch", "kept", "dropped"), [(10, 3, 4, 3), (12, 3, 4, 4), (2, 3, 1, 0), (1, 1, 1, 1)]
    )
    def test_steps_of_an_epoch(self, samples: int, batch: int, kept: int, dropped: int) -> None:
        assert Plan(samples, batch).steps_per_epoch == kept
        assert Plan(samples, batch, drop_last=True).steps_per_epoch == dropped

    @pytest.mark.parametrize("shuffle", [True, False])
    @pytest.mark.parametrize(("samples", "batch"), [(10, 3), (12, 4), (1797, 64), (7, 7), (5, 1)])
    def test_every_sample_comes_once_an_epoch(self, samples: int, batch: int, shuffle: bool) -> None:
        plan = Plan(samples, batch, seed=3, shuffle=shuffle)
        for epoch in (0, 1):
            steps = [plan.ids(epoch, step) for step in range(plan.steps_per_epoch)]
            assert all(len(ids) == batch for ids in steps[:-1])
            assert len(steps[-1]) == samples - batch * (len(steps) - 1)
            assert np.array_equal(np.sort(np.concatenate(steps)), np.arange(samples))

    def test_dropping_the_last_batch_leaves_whole_batches(self) -> None:
        plan = Plan(10, 3, drop_last=True)
        steps = [plan.ids(0, step) for step in range(plan.steps_per_epoch)]
        assert [len(ids) for ids in steps] == [3, 3, 3]
        assert len(np.unique(np.concatenate(steps))) == 9
        whole = Plan(10, 3)
        assert all(np.array_equal(ids, whole.ids(0, step)) for step, ids in enumerate(steps))

    @settings(max_examples=50, deadline=None, derandomize=True, database=None)
    @given(samples=st.integers(1, 500), batch=st.integers(1, 64), first=st.integers(0, 20), count=st.integers(0, 20))
    def test_a_span_is_its_steps_one_after_the_other(self, samples: int, batch: int, first: int, count: int) -> None:
        plan = Plan(samples, batch, seed=samples)
        first, last = min(first, plan.steps_per_epoch), min(first + count, plan.steps_per_epoch)
        steps = [plan.ids(2, step) for step in range(first, last)]
        expected = np.concatenate(steps) if steps else np.array([], dtype=np.int64)
        assert np.array_equal(plan.span(2, first, last), expected)

    def test_without_shuffling_samples_come_in_order(self) -> None:
        plan = Plan(10, 4, shuffle=False)
        assert [plan.ids(5, step).tolist() for step in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]

    def test_seeds_and_epochs_have_orders_of_their_own(self) -> None:
        orders = {
            tuple(Plan(100, 100, seed=seed).ids(epoch, 0).tolist()) for seed in (0, 1, 2, -1) for epoch in range(20)
        }
        assert len(orders) == 80

    def test_equal_plans_give_equal_ids(self) -> None:
        assert np.array_equal(Plan(1000, 10, seed=4).ids(7, 3), Plan(1000, 10, seed=4).ids(7, 3))

    def test_the_batch_size_only_cuts_the_same_order(self) -> None:
        assert np.array_equal(Plan(100, 10).span(0, 0, 10), Plan(100, 7).span(0, 0, 15))

    @pytest.mark.parametrize("samples", [0, -5, MAX_SAMPLES + 1])
    def test_an_impossible_number_of_samples_is_refused(self, samples: int) -> None:
        with pytest.raises(ValueError, match="between 1 and 2"):
            Plan(samples, 4).ids(0, 0)

    def test_describes_all_that_makes_it_what_it_is(self) -> None:
        assert Plan(10, 3, seed=2, drop_last=True).describe() == {
            "plan_version": 1,
            "samples": 10,
            "batch_size": 3,
            "seed": 2,
            "shuffle": True,
            "drop_last": True,
        }
