"""The programs in examples/ and the files in configs/ work as they are, started the way a user starts them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from distributed_training.config import Config

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def run(*words: str) -> str:
    """What a Python program says; fails with its messages if it does."""
    environment = {**os.environ, "PYTHONWARNINGS": "default"}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_train_mlp_trains_and_resumes(in_tmp: Path) -> None:
    program = str(EXAMPLES / "train_mlp.py")

    assert "completed after 8 steps" in run(program, "--epochs=1", "--samples=640")
    assert "completed after 24 steps" in run(program, "--epochs=3", "--samples=640", "--resume=auto")


def test_own_model_dataset_and_preprocessing(in_tmp: Path) -> None:
    for name in ("own_dataset.py", "config_own_model.yaml"):
        shutil.copy(EXAMPLES / name, in_tmp)
    dtrain = ("-m", "distributed_training")

    said = run(*dtrain, "train", "config_own_model.yaml", "training.epochs=2", "data.args.samples=120")
    assert "Training completed (2 epochs, 6 steps" in said
    metrics = json.loads(run(*dtrain, "validate", "runs/waves", "--json"))
    assert metrics["samples"] == 24


@pytest.mark.parametrize("path", [*(ROOT / "configs").glob("*.yaml"), EXAMPLES / "config_own_model.yaml"], ids=str)
def test_config_loads(path: Path, in_tmp: Path) -> None:
    assert Config.from_file(path).get("training.epochs") >= 1


def test_digits_config_is_the_default_job(in_tmp: Path) -> None:
    assert Config.from_file(ROOT / "configs" / "digits.yaml").to_dict() == Config().to_dict()
