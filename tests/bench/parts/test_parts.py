"""The parts of `dtrain bench` that one process measures, each run in a small form, as they run in the large."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from distributed_training.bench.figures import PartResult
from distributed_training.bench.options import BenchOptions
from distributed_training.bench.parts import checkpoint, feed, loading, overhead, precision
from distributed_training.bench.parts.precision import final_losses
from distributed_training.config.errors import ConfigError


def options(rounds: int = 2, **more: Any) -> BenchOptions:
    return BenchOptions(rounds=rounds, warmup=0, quick=True, device="cpu", timeout=120.0, **more)


def medians(result: PartResult, quantity: str) -> dict[str, float]:
    """By variant."""
    return {figure.variant: figure.median for figure in result.figures if figure.quantity == quantity}


def values(result: PartResult, quantity: str, variant: str) -> list[float]:
    return next(f.values for f in result.figures if (f.quantity, f.variant) == (quantity, variant))


def test_overhead_of_ours_beside_a_raw_loop_and_other_libraries() -> None:
    chosen = ("ours", "raw", "accelerate", "captured")
    result = overhead.run(options(cases=("mlp",), variants=chosen, batch_size=8))
    taken = medians(result, overhead.TIME)
    assert set(taken) == {"ours", "raw", "accelerate"}
    assert all(10 < microseconds < 1e6 for microseconds in taken.values())
    assert result.skipped == {"captured (MLP 100-512-10, batch 8)": "needs a GPU, and this is measured on cpu"}
    ratios = values(result, overhead.BEST, "ours to raw")
    own, raw = values(result, overhead.TIME, "ours"), values(result, overhead.TIME, "raw")
    assert ratios == pytest.approx([theirs / mine for theirs, mine in zip(raw, own)])
    assert all(figure.reference == "ours" for figure in result.figures if figure.quantity == overhead.TIME)


def test_precision_trains_alike_in_all_of_them() -> None:
    result = precision.run(options(cases=("mlp",), variants=("fp32", "bf16", "tf32"), batch_size=16))
    losses = medians(result, precision.LOSS)
    assert set(losses) == {"fp32", "bf16"}
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.05)
    assert losses["bf16"] != losses["fp32"]
    assert result.skipped == {"tf32": "tf32 is for GPUs; on the CPU there are fp32 and bf16"}
    for variant in losses:
        rates, times = values(result, precision.THROUGHPUT, variant), values(result, precision.TIME, variant)
        assert all(math.isclose(rate * microseconds / 1e6, 16) for rate, microseconds in zip(rates, times))


def test_final_losses_are_after_the_same_number_of_steps() -> None:
    restarted = [{"turn": 1, "loss": 0.9}, {"turn": 1, "loss": 0.9}]
    going_on = [{"turn": 1, "loss": 0.8}, {"turn": 2, "loss": 0.5}]
    assert final_losses({"a": going_on, "b": going_on}) == {"a": 0.5, "b": 0.5}
    assert final_losses({"a": going_on, "b": restarted}) == {"a": 0.8, "b": 0.9}


def test_loading_with_and_without_workers_and_through_the_split() -> None:
    chosen = ("torch-0", "ours-0", "ours-1", "split-1", "split-tcp-1")
    result = loading.run(options(1, variants=chosen, processes=(1,)))
    for case in loading.CASES.values():
        figures = [figure for figure in result.figures if figure.case == case]
        assert all(figure.median > 100 for figure in figures)
        assert {figure.variant: figure.reference for figure in figures} == {
            "torch-0": "torch-0",
            "ours-0": "torch-0",
            "ours-1": None,
            "split-1": "ours-1",
            "split-tcp-1": "ours-1",
        }
    assert "pinned memory" in result.skipped


def test_checkpoints_beside_torch_save_and_a_raw_write(in_tmp: Path) -> None:
    result = checkpoint.run(options())
    stopped, durable, load = (medians(result, quantity) for quantity, _ in checkpoint._QUANTITIES.values())
    assert set(stopped) == {"copy", "raw", "torch.save", "ours"}
    assert set(durable) == set(load) == {"raw", "torch.save", "ours"}
    assert (
        values(result, "time until durable", "ours")[0] > values(result, "time that training stands still", "ours")[0]
    )
    assert durable["raw"] == stopped["raw"]
    assert list(in_tmp.iterdir()) == []


def test_feed_beside_raw_sockets_and_training_over_the_split() -> None:
    chosen = ("raw", "raw-tls", "ours-tcp", "ours-tls", "ours-shared", "in-memory", "split")
    result = feed.run(options(1, variants=chosen, cases=("26KB", "training-mlp")))
    rates, volumes = medians(result, feed.RATE), medians(result, feed.VOLUME)
    assert set(rates) == {"raw", "raw-tls", "ours-tcp", "ours-tls", "ours-shared"}
    assert all(volumes[way] == pytest.approx(rate * 64 * 408 / 1e6) for way, rate in rates.items())
    assert set(medians(result, feed.TIME)) == {"in-memory", "split"}
    assert 0 <= medians(result, feed.WAITING)["split"] <= 1


@pytest.mark.parametrize("part", [overhead, precision, loading, checkpoint, feed])
def test_unknown_names_are_refused_before_anything_is_measured(part: Any) -> None:
    with pytest.raises(ConfigError, match="--variants ourz: there is no such name"):
        part.run(options(variants=("ourz",)))
    with pytest.raises(ConfigError, match="--cases nothing: there is no such name"):
        part.run(options(cases=("nothing",)))
