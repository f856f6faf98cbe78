"""Side-by-side measuring."""

from __future__ import annotations

from distributed_training.bench.measure import Measured, difference, interleave, ratio


def test_variants_take_turns_and_warm_up_rounds_are_thrown_away() -> None:
    calls: list[str] = []

    def variant(name: str, value: float):
        def run() -> float:
            calls.append(name)
            return value + len(calls)

        return run

    measured = interleave({"a": variant("a", 0), "b": variant("b", 100)}, rounds=2, warmup=1)
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert measured["a"].values == [4, 5]
    assert measured["b"].values == [103, 106]


def test_ratio_and_difference_compare_round_by_round() -> None:
    measured = {"ours": Measured([1.0, 10.0, 100.0]), "raw": Measured([2.0, 20.0, 200.0])}  # a machine that slows down
    assert ratio(measured, "ours", "raw") == 0.5
    assert difference(measured, "raw", "ours") == 10.0


def test_spread_tells_quiet_from_noisy() -> None:
    assert not Measured([1.0, 1.01, 0.99, 1.0]).noisy
    assert Measured([1.0, 2.0, 3.0, 4.0]).noisy
    assert Measured([5.0]).spread == 0.0
