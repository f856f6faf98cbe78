"""The programs in examples/ and the files in configs/ work as they are, started the way a user starts them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.launching import free_port, run_mpi

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


def test_a_loop_of_ones_own_alone_and_under_mpirun(in_tmp: Path) -> None:
    program = [str(EXAMPLES / "train_mpi.py"), "--epochs=2", "--samples=640", "--save=saved"]

    alone = run(*program).splitlines()
    assert alone[-1].startswith("1 processes, 16 steps, accuracy ")
    other = [*program[:-1], "--save=others"]
    together = run_mpi(2, other, cwd=in_tmp, MASTER_PORT=str(free_port())).stdout.splitlines()
    assert together[:2] == alone[:2]  # the same losses to the digits shown
    assert together[-1] == alone[-1].replace("1 processes", "2 processes")
    assert [path.name for path in (in_tmp / "others").iterdir()] == ["step-0000000016"]


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


STARTED_BY = {
    "colab.ipynb": "split/test_notebook.py",
    "colab_home.py": "split/test_tunnels.py",
    "config_own_model.yaml": "docs/test_examples_folder.py",
    "image_inference_example.py": "split/test_services.py",
    "inference_cpu.py": "split/test_services.py",
    "inference_gpu.py": "split/test_services.py",
    "own_dataset.py": "docs/test_examples_folder.py",
    "text_classification.py": "huggingface/test_pages.py",
    "train_cpu.py": "split/test_examples.py",
    "train_gpu.py": "split/test_examples.py",
    "train_mlp.py": "docs/test_examples_folder.py",
    "train_mpi.py": "docs/test_examples_folder.py",
    "validate_cpu.py": "split/test_services.py",
    "validate_gpu.py": "split/test_services.py",
}
"""Which file of tests starts each example."""


def test_every_example_is_started_by_some_test() -> None:
    assert STARTED_BY.keys() == {path.name for path in EXAMPLES.iterdir() if path.is_file()}
    for name, file in STARTED_BY.items():
        source = (ROOT / "tests" / file).read_text()
        assert name in source or name.replace(name.split("_")[0], "{kind}") in source, f"{file} does not start {name}"
