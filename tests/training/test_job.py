"""A job from a config alone, and the loss curve that no refactoring may change.

The curve in `losses/digits_mlp.json` is the training loss of every step of the default job. If a change is *meant* to
alter the training, write it anew and say so in the changelog:

    REGENERATE_LOSSES=1 python -m pytest tests/training/test_job.py
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.examples import assert_same_weights, events

from distributed_training.config import Config
from distributed_training.data import Loader
from distributed_training.training.job import build_job, make_loader, sample_shape

CURVE = Path(__file__).parent / "losses" / "digits_mlp.json"


def job_config(**changes: Any) -> Config:
    quiet = {"run.progress": "off", "training.device": "cpu", "training.log_every": 1}
    return Config().replace(**{**quiet, **changes})


def test_the_default_job_follows_the_stored_curve(in_tmp: Path) -> None:
    with build_job(job_config(**{"training.epochs": 3}), run_dir="run") as job:
        result = job.train()
    assert result.status == "completed"
    found = [event["train_loss"] for event in events(Path("run"), "metrics") if "train_loss" in event]
    found_val = [event["val_loss"] for event in events(Path("run"), "metrics") if "val_loss" in event]
    if os.environ.get("REGENERATE_LOSSES"):
        CURVE.parent.mkdir(exist_ok=True)
        CURVE.write_text(json.dumps({"train_loss": found, "val_loss": found_val}, indent=1) + "\n")
    stored = json.loads(CURVE.read_text())
    assert len(found) == result.steps == len(stored["train_loss"])
    assert found == pytest.approx(stored["train_loss"], rel=1e-4)
    assert found_val == pytest.approx(stored["val_loss"], rel=1e-4)


def test_the_weights_are_a_function_of_the_seed() -> None:
    def weights(seed: int, before: int) -> torch.nn.Module:
        torch.manual_seed(before)
        with build_job(job_config(**{"training.seed": seed}), run_dir=False) as job:
            return job.trainer.model

    assert_same_weights(weights(0, before=1), weights(0, before=2))
    assert not torch.equal(next(weights(0, 1).parameters()), next(weights(1, 1).parameters()))


def test_loaders_are_planned_for_training_and_in_order_for_validation() -> None:
    with build_job(job_config(**{"training.batch_size": 50}), run_dir=False) as job:
        assert (job.train_data.plan.batch_size, job.train_data.plan.shuffle) == (50, True)
        assert isinstance(job.val_data, Loader)
        assert not job.val_data.plan.shuffle
        assert job.trainer.num_classes == 10


def test_without_validation_there_is_none() -> None:
    with build_job(job_config(**{"data.validation_fraction": 0.0, "training.epochs": 1}), run_dir=False) as job:
        assert job.val_data is None
        assert "val_loss" not in job.train().metrics


def test_a_preprocessing_function_is_applied_to_each_sample(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (in_tmp / "my_preprocessing.py").write_text(
        "def halve(sample):\n    x, y = sample\n    return x.flatten()[:4] / 2, y\n"
    )
    monkeypatch.syspath_prepend(str(in_tmp))
    with build_job(job_config(**{"data.preprocess": "my_preprocessing:halve"}), run_dir=False) as job:
        assert sample_shape(job.train_data.dataset) == (4,)


def test_loader_processes_end_with_the_job() -> None:
    with build_job(job_config(**{"data.num_workers": 1, "training.epochs": 1}), run_dir=False) as job:
        assert job.train().status == "completed"


def test_a_batch_larger_than_the_validation_data_is_cut() -> None:
    from distributed_training.data import ArrayDataset

    dataset = ArrayDataset((torch.zeros(5, 2), torch.zeros(5).long()))
    assert make_loader(dataset, job_config(), training=False).plan.batch_size == 5


def test_the_shape_of_nothing_is_unknown() -> None:
    from distributed_training.data import ArrayDataset

    assert sample_shape(ArrayDataset((torch.zeros(0, 2),))) is None
    assert sample_shape(ArrayDataset((torch.zeros(3, 1, 4),))) == (1, 4)
