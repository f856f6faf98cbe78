"""Validation and inference with a GPU side that is a process of its own: commands, kill -9, examples."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.cli.conftest import Outcome, dtrain  # noqa: F401 (a fixture)
from tests.launching import ROOT, free_port
from tests.split.conftest import Side, Start, train_here
from tests.split.services import QUICK, Rows

from distributed_training import CPULoader
from distributed_training.split.inference import run_inference

EXAMPLES = ROOT / "examples"


def serve(start: Start, mode: str, port: int) -> Side:
    """A GPU side that is ready."""
    (side,) = start(["serve", "runs/digits", "--mode", mode, f"network.port={port}"])
    side.until("waiting for clients")
    return side


def test_commands(start: Start, dtrain: Callable[..., Outcome]) -> None:  # noqa: F811
    train_here("training.epochs=2", "run.name=digits")
    port = free_port()
    link = f"127.0.0.1:{port}"
    gpu = serve(start, "validation", port)
    far = json.loads(dtrain("validate", "runs/digits", "--to", link, "--json").out)
    near = json.loads(dtrain("validate", "runs/digits", "--json").out)
    assert (far["average_loss"], far["accuracy"]) == (near["loss"], near["accuracy"])
    assert sum(map(sum, far["confusion_matrix"])) == far["total_samples"] == near["samples"]
    refused = dtrain("predict", "runs/digits", "--to", link)
    assert refused.code == 9
    assert "is there for validation, not for inference; start one with mode='inference'" in refused.err
    gpu.signal(signal.SIGTERM)
    assert f"served 1 clients: {near['samples']} samples" in gpu.end()

    port = free_port()
    serve(start, "inference", port)
    Path("config.yaml").write_text(Path("runs/digits/config.yaml").read_text())  # what a machine with the data has
    far_side = ("predict", "config.yaml", "--to", f"127.0.0.1:{port}")
    assert "359 predictions in far.csv" in dtrain(*far_side, "--output", "far.csv").out
    printed = dtrain(*far_side)
    assert printed.out.splitlines() == Path("far.csv").read_text().splitlines()
    assert "bytes a sample, mode predictions" in printed.err
    dtrain("predict", "runs/digits", "--output", "near.csv")
    far_rows, near_rows = (Path(name).read_text().splitlines() for name in ("far.csv", "near.csv"))
    assert [row.rpartition(",")[0] for row in far_rows] == [row.rpartition(",")[0] for row in near_rows]


def test_a_gpu_side_that_is_killed_and_started_again_is_not_noticed(start: Start, in_tmp: Path) -> None:
    train_here("training.epochs=1", "run.name=digits")
    port, generator = free_port(), torch.Generator().manual_seed(0)
    images, paused, goes_on = torch.rand(120, 1, 8, 8, generator=generator), threading.Event(), threading.Event()

    class Pausing(Rows):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            if index == 60:
                paused.set()
                assert goes_on.wait(60)
            return super().__getitem__(index)

    first = serve(start, "inference", port)
    data, link = Pausing((images, torch.zeros(120, dtype=torch.int64))), f"127.0.0.1:{port}"
    with ThreadPoolExecutor(1) as pool:
        disturbed = pool.submit(run_inference, data, link, batch_size=4, settings=QUICK)
        assert paused.wait(60)
        first.signal(signal.SIGKILL)
        first.end()
        serve(start, "inference", port)
        goes_on.set()
        result = disturbed.result(60)
    undisturbed = CPULoader(num_workers=1).run_inference("127.0.0.1", data.data, gpu_port=port, batch_size=4)
    assert result["transfer"]["connections"] == 2
    for name in ("predictions", "confidences", "top_classes", "top_probabilities"):
        np.testing.assert_array_equal(result[name], undisturbed[name])


def test_examples_of_both_sides(start: Start, in_tmp: Path) -> None:
    (trained,) = start([str(EXAMPLES / "train_mlp.py"), "--epochs=1", "--samples=640"])
    assert "completed after 8 steps" in trained.end()
    for kind, expected in (("validate", "128 samples, accuracy 0."), ("inference", "640 samples at")):
        port = f"--port={free_port()}"
        gpu, cpu = start(
            [str(EXAMPLES / f"{kind}_gpu.py"), port, "--tasks=1"],
            [str(EXAMPLES / f"{kind}_cpu.py"), port, "--samples=640", "--workers=1"],
        )
        assert expected in cpu.end()
        assert "served 1 clients" in gpu.end()


def test_the_example_with_images(in_tmp: Path) -> None:
    pytest.importorskip("PIL")
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "image_inference_example.py"), "--workers=1"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONWARNINGS": "default"},
    )
    assert done.returncode == 0, done.stderr
    assert "24 of 24 right" in done.stdout
