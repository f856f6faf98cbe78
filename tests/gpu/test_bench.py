"""Loops of the benchmark that need a GPU: graphs recorded by hand, compiled models, memory that must be shared."""

from __future__ import annotations

import pytest

from distributed_training.bench.options import BenchOptions
from distributed_training.bench.parts import checkpoint, feed, loading, overhead, precision

pytestmark = pytest.mark.timeout(600)  # kernels are compiled for each variant
OPTIONS = {"rounds": 1, "warmup": 0, "quick": True, "device": "cuda", "timeout": 300.0}


@pytest.mark.parametrize("case", ["mlp", "gpt-tiny"])
def test_every_loop_by_hand_runs(case: str) -> None:
    chosen = (
        "ours",
        "raw",
        "raw-tf32",
        "raw-bf16",
        "raw-compile",
        "raw-reduce-overhead",
        "captured",
        "captured-compile",
    )
    result = overhead.run(BenchOptions(cases=(case,), variants=chosen, **OPTIONS))  # type: ignore[arg-type]
    assert result.skipped == {}
    assert {figure.variant for figure in result.figures if figure.quantity == overhead.TIME} == set(chosen)


def test_channels_last_is_for_images() -> None:
    chosen = ("raw-channels-last", "captured-channels-last", "captured-compile-channels-last")
    result = overhead.run(BenchOptions(cases=("resnet18",), variants=chosen, **OPTIONS))  # type: ignore[arg-type]
    assert result.skipped == {}
    assert len([figure for figure in result.figures if figure.quantity == overhead.TIME]) == 3


def test_all_precisions_train_alike() -> None:
    chosen = ("fp32", "tf32", "fp16", "bf16")
    result = precision.run(BenchOptions(cases=("mlp",), variants=chosen, **OPTIONS))  # type: ignore[arg-type]
    losses = {figure.variant: figure.median for figure in result.figures if figure.quantity == precision.LOSS}
    assert set(losses) == set(chosen)
    assert all(loss == pytest.approx(losses["fp32"], rel=0.05) for loss in losses.values())
    assert all(figure.median > 0 for figure in result.figures if figure.quantity == precision.MEMORY)


def test_loading_feed_and_checkpoints_reach_the_gpu(in_tmp: object) -> None:
    variants = ("torch-1-pinned", "ours-1-pinned", "resident", "split-1")
    result = loading.run(BenchOptions(cases=("arrays",), variants=variants, processes=(1,), **OPTIONS))  # type: ignore[arg-type]
    assert {figure.variant for figure in result.figures} == set(variants)
    result = feed.run(BenchOptions(cases=("training-resnet18",), **OPTIONS))  # type: ignore[arg-type]
    assert {figure.variant for figure in result.figures} == {"in-memory", "resident", "split", "split-tcp"}
    assert checkpoint.run(BenchOptions(cases=("40MB",), **OPTIONS)).figures  # type: ignore[arg-type]
