"""A whole training on several ranks is the training of one process: losses, metrics, predictions, weights, ledger."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.forked_ranks import RankServer

JOB = str(Path(__file__).parent / "job.py")
TOLERANCE = 1e-6
Run = Callable[..., tuple[dict[str, Any], dict[str, torch.Tensor]]]


@pytest.fixture
def run(rank_server: RankServer, tmp_path: Path) -> Run:
    """(summary, tensors) of a training."""

    def run(name: str, ranks: int, *words: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        job = [JOB, str(tmp_path / name), *words]
        codes, screen = (rank_server.start(ranks, job) if ranks > 1 else rank_server.start_alone(job)).end()
        assert codes == [0] * ranks, screen
        out = tmp_path / name
        return json.loads((out / "summary.json").read_text()), load_file(out / "tensors.safetensors")

    return run


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
def test_uneven_batches_accumulation_and_clipping(run: Run, ranks: int) -> None:
    alone, together = run("alone", 1, *HARD), run("ranks", ranks, *HARD)
    assert together[0]["world"] == ranks
    same_training(together, alone)
    assert ledger(together[0]) == ledger(alone[0])
    assert together[0]["seen"] == alone[0]["seen"]  # gather_for_metrics: all rows in order, none twice


def test_steps_with_fewer_samples_than_ranks(run: Run) -> None:
    """103 samples in steps of 2 over 3 ranks: in every step a rank has nothing, in the last two have."""
    words = ("training.batch_size=2", "training.epochs=1", "job.held_out=2", "data.num_workers=1")
    alone, together = run("alone", 1, *words), run("ranks", 3, *words)
    same_training(together, alone)
    assert together[0]["seen"] == alone[0]["seen"]


def test_batch_norm_over_all_ranks_is_that_of_one_device(run: Run) -> None:
    words = ("job.batchnorm=1", "strategy.sync_batchnorm=true")
    same_training(run("ranks", 2, *words), run("alone", 1, *words), 1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_with_recomputed_activations(run: Run, precision: str) -> None:
    words = (f"training.precision={precision}", "training.gradient_checkpointing=true", "training.epochs=1")
    alone, together = run("alone", 1, *words), run("ranks", 2, *words)
    assert together[0]["losses"] == pytest.approx(alone[0]["losses"], rel=0.02)


@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 3)])
def test_resume_on_another_number_of_ranks(run: Run, first: int, second: int) -> None:
    whole = run("whole", 1, "job.optimizer=adamw")
    run("part", first, "job.optimizer=adamw", "training.epochs=2")
    rest = run("part", second, "job.optimizer=adamw", "checkpoint.resume=auto")
    for name, value in whole[1].items():
        torch.testing.assert_close(rest[1][name], value, rtol=1e-5, atol=1e-5, msg=name)
    assert rest[0]["losses"] == pytest.approx(whole[0]["losses"][-len(rest[0]["losses"]) :], rel=1e-5)
    assert ledger(rest[0]) == ledger(whole[0])


def test_compressed_gradients_train_nearly_alike(run: Run) -> None:
    words = ("strategy.bucket_mb=0.0005", "strategy.powersgd_start_step=3", "strategy.powersgd_rank=2")
    exact, _ = run("exact", 2)
    for compression in ("fp16", "bf16", "powersgd", "batched_powersgd"):
        lossy, _ = run(compression, 2, f"strategy.compression={compression}", *words)
        assert lossy["losses"] != exact["losses"], compression
        assert lossy["losses"][-1] == pytest.approx(exact["losses"][-1], rel=0.3), compression
        assert lossy["losses"][-1] < lossy["losses"][0], compression
