"""A whole training on several ranks is the training of one process: losses, metrics, predictions, weights, ledger."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.launching import ROOT, environment, run_ranks

JOB = str(Path(__file__).parent / "job.py")
TOLERANCE = 1e-6


def run(folder: Path, name: str, ranks: int, *words: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """(summary, tensors) of a training."""
    command = [JOB, str(folder / name), *words]
    if ranks == 1:
        own = environment(PYTHONPATH=str(ROOT))
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=own, timeout=120)
        assert done.returncode == 0, done.stderr
    else:
        run_ranks(ranks, command, PYTHONPATH=str(ROOT))
    return json.loads((folder / name / "summary.json").read_text()), load_file(folder / name / "tensors.safetensors")


def same_training(one: Any, other: Any, tolerance: float = TOLERANCE) -> None:
    (summary, tensors), (expected, reference) = one, other
    assert summary["losses"] == pytest.approx(expected["losses"], rel=tolerance, abs=tolerance)
    for name, value in reference.items():
        torch.testing.assert_close(tensors[name], value, rtol=tolerance, atol=tolerance, msg=name)
    assert summary["metrics"] == pytest.approx(expected["metrics"], rel=10 * tolerance)
    assert summary["evaluated"] == pytest.approx(expected["evaluated"], rel=10 * tolerance)


def ledger(summary: dict[str, Any]) -> list[dict[str, Any]]:
    lines = (Path(summary["run_dir"]) / "ledger.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "ids" in line]


HARD = ("training.gradient_accumulation=2", "training.gradient_clip=0.5")


@pytest.mark.parametrize("ranks", [2, 3])
def test_uneven_batches_accumulation_and_clipping(tmp_path: Path, ranks: int) -> None:
    alone, together = run(tmp_path, "alone", 1, *HARD), run(tmp_path, "ranks", ranks, *HARD)
    assert together[0]["world"] == ranks
    same_training(together, alone)
    assert ledger(together[0]) == ledger(alone[0])
    assert together[0]["seen"] == alone[0]["seen"]  # gather_for_metrics: all rows in order, none twice


def test_steps_with_fewer_samples_than_ranks(tmp_path: Path) -> None:
    """103 samples in steps of 2 over 3 ranks: in every step a rank has nothing, in the last two have."""
    words = ("training.batch_size=2", "training.epochs=1", "job.held_out=2", "data.num_workers=1")
    alone, together = run(tmp_path, "alone", 1, *words), run(tmp_path, "ranks", 3, *words)
    same_training(together, alone)
    assert together[0]["seen"] == alone[0]["seen"]


def test_batch_norm_over_all_ranks_is_that_of_one_device(tmp_path: Path) -> None:
    words = ("job.batchnorm=1", "strategy.sync_batchnorm=true")
    same_training(run(tmp_path, "ranks", 2, *words), run(tmp_path, "alone", 1, *words), 1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_with_recomputed_activations(tmp_path: Path, precision: str) -> None:
    words = (f"training.precision={precision}", "training.gradient_checkpointing=true", "training.epochs=1")
    alone, together = run(tmp_path, "alone", 1, *words), run(tmp_path, "ranks", 2, *words)
    assert together[0]["losses"] == pytest.approx(alone[0]["losses"], rel=0.02)


@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 3)])
def test_resume_on_another_number_of_ranks(tmp_path: Path, first: int, second: int) -> None:
    whole = run(tmp_path, "whole", 1, "job.optimizer=adamw")
    run(tmp_path, "part", first, "job.optimizer=adamw", "training.epochs=2")
    rest = run(tmp_path, "part", second, "job.optimizer=adamw", "checkpoint.resume=auto")
    for name, value in whole[1].items():
        torch.testing.assert_close(rest[1][name], value, rtol=1e-5, atol=1e-5, msg=name)
    assert rest[0]["losses"] == pytest.approx(whole[0]["losses"][-len(rest[0]["losses"]) :], rel=1e-5)
    assert ledger(rest[0]) == ledger(whole[0])


@pytest.mark.parametrize("compression", ["fp16", "bf16", "powersgd", "batched_powersgd"])
def test_compressed_gradients_train_nearly_alike(tmp_path: Path, compression: str) -> None:
    words = ("strategy.bucket_mb=0.0005", "strategy.powersgd_start_step=3", "strategy.powersgd_rank=2")
    exact, _ = run(tmp_path, "exact", 2)
    lossy, _ = run(tmp_path, "lossy", 2, f"strategy.compression={compression}", *words)
    assert lossy["losses"] != exact["losses"]
    assert lossy["losses"][-1] == pytest.approx(exact["losses"][-1], rel=0.3)
    assert lossy["losses"][-1] < lossy["losses"][0]
