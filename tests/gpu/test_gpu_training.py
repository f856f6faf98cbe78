"""The single-device core on a GPU: precision, guard without waiting, exact resume, memory, labels."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from distributed_training import Callback, Config, Trainer
from distributed_training.config import AugmentConfig
from distributed_training.data import ImageTransform
from distributed_training.models import get_model
from distributed_training.runtime.errors import DataError, OutOfMemoryError, TrainingDivergedError
from distributed_training.training.job import build_job

CUDA = torch.device("cuda")


def config(**settings: object) -> Config:
    return Config().replace(**{"run.progress": "off", "training.device": "cuda", **settings})


def mlp(inputs: int = 20, classes: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, classes))


def blobs(samples: int = 512) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 4, (samples,), generator=generator)
    centers = torch.randn(4, 20, generator=generator) * 3
    return centers[labels] + torch.randn(samples, 20, generator=generator), labels


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16", "auto"])
@pytest.mark.parametrize("compiled", [False, True])
def test_every_precision_learns(in_tmp, precision: str, compiled: bool) -> None:
    if compiled and precision not in ("bf16", "fp16"):
        pytest.skip("compile is tried with two precisions")
    trainer = Trainer(
        mlp(), config=config(**{"training.precision": precision, "training.compile": compiled, "training.lr": 0.01})
    )
    result = trainer.train(blobs(), blobs(), epochs=6)
    assert result.status == "completed"
    assert result.metrics["val_accuracy"] > 0.97
    trainer.strategy.teardown()


def test_digits_job_reaches_its_accuracy_on_the_gpu(in_tmp) -> None:
    with build_job(config(**{"data.num_workers": 2})) as job:
        result = job.train()
    assert result.metrics["val_accuracy"] >= 0.97
    job.trainer.strategy.teardown()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_the_loop_waits_for_the_gpu_only_when_it_logs(in_tmp) -> None:
    """torch raises on any synchronising call, once it is clear how steps run and until the last before the log."""

    class NoWaiting(Callback):
        def on_step_end(self, trainer: Trainer, step: int, loss: torch.Tensor) -> None:
            if step == 6:
                torch.cuda.set_sync_debug_mode("error")
            if step == 28:
                torch.cuda.set_sync_debug_mode("default")

    settings = {"training.log_every": 1000, "training.batch_size": 16, "training.gradient_clip": 1.0}
    for optimizer, capture in itertools.product(("adamw", "sgd"), ("on", "off")):
        chosen = config(**settings, **{"training.optimizer": optimizer, "training.capture": capture})
        trainer = Trainer(mlp(), config=chosen, callbacks=[NoWaiting()], run_dir=False)
        try:
            assert trainer.train(blobs(), epochs=1).steps == 32
        finally:
            torch.cuda.set_sync_debug_mode("default")
            trainer.strategy.teardown()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_resume_is_bit_identical_with_deterministic_kernels(in_tmp, precision: str) -> None:
    class Stop(Callback):
        def on_step_end(self, trainer: Trainer, step: int, loss: torch.Tensor) -> None:
            if trainer.cursor.global_step == 21:
                trainer.stop("test")

    def run(name: str, *callbacks: Callback) -> Trainer:
        model = nn.Sequential(nn.Linear(20, 64), nn.Dropout(0.2), nn.ReLU(), nn.Linear(64, 4))
        torch.manual_seed(0)
        for p in model.parameters():
            nn.init.normal_(p, std=0.1)
        settings = {"run.name": name, "training.precision": precision, "training.gradient_accumulation": 2}
        trainer = Trainer(model, config=config(**settings), callbacks=callbacks)
        trainer.train(blobs(), epochs=5, resume="auto")
        trainer.strategy.teardown()
        return trainer

    whole = run("whole")
    run("parts", Stop())
    parts = run("parts")
    for a, b in zip(whole.model.parameters(), parts.model.parameters()):
        assert torch.equal(a, b)


def test_a_non_finite_step_is_skipped_on_the_device(in_tmp) -> None:
    inputs, labels = blobs()
    inputs[5] = float("nan")
    trainer = Trainer(mlp(), config=config(**{"training.batch_size": 32}))
    result = trainer.train((inputs, labels), epochs=2)
    assert result.skipped_steps == 2
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
    trainer.strategy.teardown()


def test_an_optimizer_that_cannot_skip_by_itself_is_guarded_too(in_tmp) -> None:
    inputs, labels = blobs()
    inputs[5] = float("nan")
    model = mlp().to(CUDA)
    trainer = Trainer(model, torch.optim.RMSprop(model.parameters()), config=config())
    assert trainer.train((inputs, labels), epochs=1).skipped_steps == 1
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
    trainer.strategy.teardown()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_run_of_non_finite_steps_ends_with_an_error(in_tmp, precision: str) -> None:
    inputs, labels = blobs()
    trainer = Trainer(mlp(), config=config(**{"training.precision": precision}))
    with pytest.raises(TrainingDivergedError, match="steps in a row"):
        trainer.train((inputs * float("nan"), labels), epochs=10)
    trainer.strategy.teardown()


def test_out_of_memory_ends_with_advice(in_tmp) -> None:
    class Greedy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(20, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) + torch.empty(2**40, device=x.device).sum()

    trainer = Trainer(Greedy(), config=config())
    with pytest.raises(OutOfMemoryError, match="gradient_accumulation=2"):
        trainer.train(blobs(), epochs=1)
    trainer.strategy.teardown()


def test_a_label_out_of_range_is_named_before_the_gpu_sees_it(in_tmp) -> None:
    inputs, labels = blobs()
    labels[7] = 11
    trainer = Trainer(mlp(), config=config(**{"model.num_classes": 4}))
    with pytest.raises(DataError, match="sample 7 has label 11"):
        trainer.train((inputs, labels), epochs=1)
    assert torch.zeros(1, device=CUDA).item() == 0  # the device is still usable
    trainer.strategy.teardown()


def test_augmentation_is_the_same_on_both_devices() -> None:
    images = torch.randint(0, 256, (16, 3, 32, 32), dtype=torch.uint8)
    ids = np.arange(100, 116)
    settings = AugmentConfig(crop=4, flip=True, mean=[0.5, 0.4, 0.3], std=[0.2, 0.2, 0.2])
    here = ImageTransform(settings, 3)(images, ids, 2, training=True)
    there = ImageTransform(settings, 3)(images.to(CUDA), ids, 2, training=True)
    torch.testing.assert_close(there.cpu(), here)


def test_gradient_checkpointing_saves_memory_and_changes_nothing(in_tmp) -> None:
    def run(checkpointing: bool) -> tuple[float, int]:
        torch.manual_seed(0)
        model = get_model("resnet18")(Config().replace(**{"model.num_classes": 10}).model)
        settings = {"training.gradient_checkpointing": checkpointing, "training.precision": "fp32", "training.seed": 1}
        data = (torch.randn(64, 3, 64, 64), torch.randint(0, 10, (64,)))
        torch.cuda.reset_peak_memory_stats()
        trainer = Trainer(model, config=config(**settings, **{"training.log_every": 1}), run_dir=False)
        loss = trainer.train(data, epochs=1).metrics["train_loss"]
        trainer.strategy.teardown()
        return loss, torch.cuda.max_memory_allocated()

    plain, recomputed = run(False), run(True)
    assert recomputed[0] == pytest.approx(plain[0], rel=1e-4)
    assert recomputed[1] < 0.8 * plain[1]
