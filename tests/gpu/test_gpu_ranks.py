"""Strategies of many processes on CUDA: NCCL with one rank, and two ranks on one GPU over Gloo."""

from __future__ import annotations

import json

import pytest
import torch
from tests.launching import run_ranks

CONTRACT = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/strategies/ranks/contract_native.py"]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("strategy", "options", "ranks"),
    [
        pytest.param("ddp", {}, 1, id="ddp-nccl"),
        pytest.param("ddp", {"backend": "gloo"}, 2, id="ddp-gloo-2"),
        pytest.param("zero1", {}, 1, id="zero1-nccl"),
        pytest.param("zero2", {}, 1, id="zero2-nccl"),
        pytest.param("zero3", {}, 1, id="zero3-nccl"),
        pytest.param("fsdp", {"cpu_offload": True}, 1, id="fsdp-offload"),
    ],
)
def test_the_contract(strategy: str, options: dict[str, object], ranks: int) -> None:
    run_ranks(ranks, CONTRACT, timeout=380, STRATEGY=strategy, OPTIONS=json.dumps(options), DEVICE="cuda")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_compiled_trains(tmp_path, strategy: str, precision: str) -> None:
    words = [f"strategy={strategy}", f"training.precision={precision}", "training.compile=true", "training.epochs=8"]
    words += ["run.progress=off", "training.gradient_clip=1.0", "training.gradient_accumulation=2"]
    program = (
        "import sys; from distributed_training.config.load import load_config; "
        "from distributed_training.training.job import build_job; "
        "job = build_job(load_config(None, sys.argv[1:])).__enter__(); result = job.train(); "
        "assert result.metrics['val_accuracy'] > 0.9, result; job.close()"
    )
    script = tmp_path / "train.py"
    script.write_text(program)
    run_ranks(1, [str(script), *words], timeout=380, cwd=tmp_path)
    assert torch.cuda.is_available()
