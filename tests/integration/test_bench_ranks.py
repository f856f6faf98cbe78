"""`dtrain bench scaling` and `strategies` with real ranks, started by our launcher and training through our Trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from distributed_training.bench.options import BenchOptions
from distributed_training.bench.parts import scaling, strategies
from distributed_training.bench.records import read_report
from distributed_training.cli.main import app
from distributed_training.config import Config
from distributed_training.runtime.errors import BenchError, ConfigError

SMALL = Config.from_dict({"model": {"args": {"hidden": [256]}}, "training": {"batch_size": 32}})


def test_scaling_of_one_and_two_processes(tmp_path: Path) -> None:
    output = tmp_path / "reports" / "benchmark.md"
    job = ["--cases", "strong", "training.batch_size=32", "model.args.hidden=[32]"]
    words = ["bench", "scaling", "--gpus", "1", "2", *job, "--quick", "--rounds", "2", "--warmup", "0"]
    result = CliRunner().invoke(app, [*words, "--output", str(output)])
    assert result.exit_code == 0, result.output
    (part,) = read_report(output.with_suffix(".json")).parts
    assert not part.skipped
    found = {(figure.quantity, figure.variant): figure.values for figure in part.figures}
    assert len(found) == 4  # throughput and efficiency of one and two
    alone, two = found["throughput", "1 process"], found["throughput", "2 processes"]
    assert min(*alone, *two) > 0
    assert found["efficiency", "2 processes"] == pytest.approx([b / a / 2 for a, b in zip(alone, two)])
    assert any("every process has 1 thread" in note for note in part.notes)
    files = ["benchmark.html", "benchmark.json", "benchmark.md", "benchmark_plots"]
    assert sorted(path.name for path in output.parent.iterdir()) == files


def test_a_rank_sends_what_the_formula_says() -> None:
    chosen = BenchOptions(
        processes=(2,), strategies=("ddp",), config=SMALL, rounds=1, warmup=0, quick=True, device="cpu"
    )
    part = strategies.run(chosen)
    found = {figure.quantity: figure.median for figure in part.figures}
    assert found["throughput"] > 0
    sent, formula = found["bytes on the wire, a step and rank"], found["bytes on the wire by the formula"]
    assert sent == pytest.approx(formula, rel=0.1)
    state = found["weights, gradients and optimizer state by the formula"]
    assert 0 <= found["peak memory per rank"] < state + 300  # so small a model is less than what a process gives back


def test_a_job_that_fails_says_why() -> None:
    with pytest.raises(BenchError, match="batch of 4096 is larger than the dataset of 1438 samples"):
        scaling.run(BenchOptions(quick=True, device="cpu", processes=(1,), batch_size=4096, config=SMALL))
    with pytest.raises(ConfigError, match="one process: give one that has several"):
        scaling.run(BenchOptions(device="cpu", processes=(1, 2), strategies=("single",)))
