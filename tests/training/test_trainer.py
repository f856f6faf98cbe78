"""`Trainer` as users write it."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.training.examples import (
    CLASSES,
    FEATURES,
    Losses,
    assert_same_weights,
    config,
    data,
    events,
    loader,
    model,
    trainer,
    weights,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from distributed_training.config import Config, ModelConfig
from distributed_training.models import build_model
from distributed_training.runtime.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    ModelError,
    OutOfMemoryError,
    TrainingDivergedError,
)
from distributed_training.training import Callback, Trainer


def test_the_readme_lines(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = model()
    own = Trainer(net, torch.optim.AdamW(net.parameters(), lr=0.05), device="cpu")
    result = own.train(loader(), loader(16), epochs=2)
    assert (result.status, result.reason, result.epochs, result.steps) == ("completed", "", 2, 12)
    assert result.seconds > 0
    assert {"val_loss", "val_accuracy"} <= result.metrics.keys()
    assert result.run_dir is not None
    assert result.run_dir.parent == Path("runs")
    assert result.best_checkpoint is not None
    assert own.evaluate(loader(16))["accuracy"] == result.metrics["val_accuracy"]
    assert {p.name for p in result.run_dir.iterdir()} == {"config.yaml", "events.jsonl", "ledger.jsonl", "checkpoints"}


def test_it_learns() -> None:
    own = trainer(training__batch_size=8)
    own.train(data(200), epochs=20)
    assert own.evaluate(data(200))["accuracy"] > 0.9


def test_without_a_config_the_rate_stays_as_the_optimizer_has_it() -> None:
    seen = []

    class Watch(Callback):
        def on_step_end(self, trainer: Trainer, step: int, loss: Tensor) -> None:
            seen.append(trainer.optimizer.param_groups[0]["lr"])

    net = model()
    Trainer(net, torch.optim.SGD(net.parameters(), lr=0.123), device="cpu", callbacks=[Watch()], run_dir=False).train(
        loader(), epochs=2
    )
    assert seen == [0.123] * 12


def test_the_optimizer_is_built_from_the_config() -> None:
    own = trainer(training__optimizer="sgd", training__lr=0.3)
    assert type(own.optimizer) is torch.optim.SGD
    assert own.optimizer.param_groups[0]["lr"] == 0.3


def test_run_dir_false_writes_nothing(in_tmp: Path) -> None:
    result = trainer(checkpoint__every_steps=1).train(loader(), loader(), epochs=1)
    assert list(in_tmp.iterdir()) == []
    assert (result.run_dir, result.best_checkpoint) == (None, None)


@pytest.mark.parametrize("kind", ["dataset", "arrays", "numpy", "list of batches", "dataloader with workers"])
def test_data_in_any_form(kind: str) -> None:
    x, y = data()
    given: Any = {
        "dataset": loader().dataset,
        "arrays": (x, y),
        "numpy": (x.numpy(), y.numpy()),
        "list of batches": list(loader()),
        "dataloader with workers": loader(num_workers=1),
    }[kind]
    result = trainer(training__batch_size=8).train(given, given, epochs=2)
    assert result.steps == 12


def test_a_stream_trains_with_a_warning_that_resume_is_not_exact(caplog: pytest.LogCaptureFixture) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(zip(*data(20)))

    result = trainer(training__warmup_epochs=0).train(DataLoader(Stream(), batch_size=6), epochs=2)
    assert result.steps == 8
    assert "has no sample plan" in caplog.text


def test_a_vae_trains_on_its_own_loss() -> None:
    net = build_model(
        ModelConfig(name="vae", args={"hidden": 8, "latent": 2}), num_classes=None, input_shape=(FEATURES,)
    )
    losses = Losses()
    result = trainer(net, losses, training__batch_size=8).train(data(), data(), epochs=10)
    assert sum(losses.seen[step] for step in range(55, 61)) < sum(losses.seen[step] for step in range(1, 7))
    assert "val_accuracy" not in result.metrics
    assert trainer(net).predict(data()[:1]).shape == (44, FEATURES)


def test_a_gpt_trains_on_dict_batches() -> None:
    args = {"vocab_size": 11, "context": 8, "layers": 1, "heads": 2, "width": 8}
    net = build_model(ModelConfig(name="gpt", args=args), num_classes=None, input_shape=None)
    ids = torch.arange(24 * 8).reshape(24, 8) % 11
    losses = Losses()
    settings = {"training__batch_size": 8, "training__gradient_accumulation": 2}
    result = trainer(net, losses, **settings).train({"input_ids": ids, "labels": ids}, epochs=6)
    assert result.steps == 18
    assert losses.seen[18] < losses.seen[1]


def test_a_users_scheduler_replaces_ours_and_comes_back_on_resume(in_tmp: Path) -> None:
    def run(epochs: int, resume: str | None = None) -> tuple[Trainer, Any]:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
        own = Trainer(net, optimizer, config=config(), run_dir="run" if resume is not None or epochs == 1 else "whole")
        own.train(loader(), epochs=epochs, scheduler=scheduler, resume=resume)
        return own, scheduler

    whole, scheduler = run(2)
    assert scheduler.last_epoch == 12
    assert whole.optimizer.param_groups[0]["lr"] == 0.125
    run(1)
    resumed, scheduler = run(2, "auto")
    assert scheduler.last_epoch == 12
    assert_same_weights(whole.model, resumed.model)


def test_a_warm_up_longer_than_the_training_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"training\.warmup_epochs=3\.0"):
        trainer(training__warmup_epochs=3).train(loader(), epochs=2)


def test_epochs_are_those_of_the_config_unless_given() -> None:
    assert trainer(training__epochs=3, training__warmup_epochs=0).train(loader(8)).epochs == 3
    assert trainer(training__epochs=3, training__warmup_epochs=0).train(loader(8), epochs=1).epochs == 1


def test_no_epochs_at_all_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"training\.epochs=0 must be at least 1"):
        trainer(training__warmup_epochs=0).train(loader(), epochs=0)


def test_a_second_training_starts_from_the_peak_rate_again() -> None:
    rates: list[float] = []

    class Watch(Callback):
        def on_step_end(self, trainer: Trainer, step: int, loss: Tensor) -> None:
            rates.append(trainer.optimizer.param_groups[0]["lr"])

    own = trainer(None, Watch(), training__schedule="cosine", training__lr=0.4, training__warmup_epochs=0)
    own.train(loader(), epochs=1)
    own.train(loader(), epochs=1)
    assert rates[6:] == rates[:6]
    assert rates[0] == 0.4


def test_the_same_trainer_can_go_on_with_its_run(in_tmp: Path) -> None:
    settings: dict[str, Any] = {"training__schedule": "step", "training__warmup_epochs": 0}
    own = trainer(None, run_dir="a", **settings)
    own.train(loader(), epochs=2)
    result = own.train(loader(), epochs=3, resume="auto")
    assert result.steps == 18
    new = trainer(None, run_dir="b", **settings)
    new.train(loader(), epochs=2)
    newer = trainer(None, run_dir="b", **settings)
    newer.train(loader(), epochs=3, resume="auto")
    assert_same_weights(own.model, newer.model)


def test_weights_of_a_checkpoint_can_be_loaded(in_tmp: Path) -> None:
    own = trainer(None, run_dir="run")
    own.train(loader(), epochs=1)
    fresh = trainer(model(seed=9))
    assert fresh.load("run") == Path("run/checkpoints/step-0000000006")
    assert_same_weights(fresh.model, own.model)
    with pytest.raises(CheckpointError, match="no usable checkpoint"):
        fresh.load("nowhere")


def test_outside_a_training_saving_and_logging_do_nothing() -> None:
    own = trainer()
    own.save()
    own.log({"x": 1.0})
    assert own.total_steps is None
    assert own.stopping == ""


def test_total_steps_are_known_while_training() -> None:
    seen = []

    class Watch(Callback):
        def on_train_start(self, trainer: Trainer) -> None:
            seen.append(trainer.total_steps)

    trainer(None, Watch()).train(loader(), epochs=2)
    assert seen == [12]


def test_gradient_checkpointing_by_config_and_by_call() -> None:
    nets = [model(dropout=0.3) for _ in range(3)]
    trainer(nets[0], training__batch_size=8).train(data(), epochs=1)
    trainer(nets[1], training__batch_size=8, training__gradient_checkpointing=True).train(data(), epochs=1)
    own = trainer(nets[2], training__batch_size=8)
    own.enable_gradient_checkpointing()
    own.train(data(), epochs=1)
    assert_same_weights(nets[0], nets[1])
    assert_same_weights(nets[0], nets[2])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_other_precisions_train(precision: str) -> None:
    losses = Losses()
    own = trainer(None, losses, training__precision=precision)
    own.train(loader(), loader(), epochs=3)
    assert losses.seen[18] < losses.seen[1]
    assert all(value.dtype == torch.float32 for value in own.model.state_dict().values())


def test_a_step_that_fp16_skips_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    x, y = data()
    x[0] = float("inf")
    result = trainer(training__precision="fp16", training__batch_size=8).train((x, y), epochs=1)
    assert result.skipped_steps == 1


def test_bad_inputs_all_over_end_the_training_with_the_sample(in_tmp: Path, caplog: pytest.LogCaptureFixture) -> None:
    x, y = data()
    before = model()
    own = trainer(None, run_dir="run", training__max_nonfinite_steps=3, training__batch_size=8)
    with pytest.raises(
        TrainingDivergedError, match=r"3 steps in a row .*the inputs of sample \d+, .*Lower training\.lr"
    ):
        own.train((x * float("nan"), y), epochs=1)
    assert_same_weights(before, own.model)
    assert events(Path("run"), "finish")[0]["status"] == "failed"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB. GPU 0 has ...\nmore"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: you tried ..."),
    ],
)
def test_running_out_of_memory_is_an_error_with_advice(error: Exception) -> None:
    own = trainer(training__gradient_accumulation=2, training__batch_size=8)

    def step(loss: Tensor) -> Any:
        raise error

    own.strategy.step = step  # type: ignore[method-assign]
    with pytest.raises(OutOfMemoryError) as caught:
        own.train(loader(), epochs=1)
    text = str(caught.value)
    assert "cpu ran out of memory at epoch 0, step 0" in text
    assert "training.gradient_accumulation=4" in text
    assert "training.gradient_checkpointing=true" in text
    assert "smaller training.batch_size" in text
    assert "more" not in text


def test_advice_that_is_followed_already_is_not_repeated() -> None:
    own = trainer(training__gradient_checkpointing=True)
    own.strategy.step = lambda loss: (_ for _ in ()).throw(torch.OutOfMemoryError("x"))  # type: ignore[method-assign]
    with pytest.raises(OutOfMemoryError) as caught:
        own.train(loader(), epochs=1)
    assert "gradient_checkpointing" not in str(caught.value)


def test_other_runtime_errors_stay_what_they_are() -> None:
    net = nn.Linear(FEATURES + 1, CLASSES)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        trainer(net).train(loader(), epochs=1)


def test_a_model_of_no_form_is_named() -> None:
    class Odd(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return (super().forward(x),)

    with pytest.raises(ModelError, match="Odd returned a tuple"):
        trainer(Odd(FEATURES, CLASSES)).train(loader(), epochs=1)


def test_nothing_readable_is_an_error() -> None:
    with pytest.raises(DataError, match="cannot read batches from int"):
        trainer().train(3)


class Broken:
    """A tracker whose every call fails."""

    def __getattr__(self, name: str) -> Any:
        raise OSError("the network is down")


def test_a_tracker_that_fails_does_not_stop_the_training(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from distributed_training.tracking import Trackers
    from distributed_training.training import session

    make = session.make_trackers
    monkeypatch.setattr(session, "make_trackers", lambda *a: Trackers([Broken(), *make(*a).active]))
    result = trainer(None, run_dir="run").train(loader(), epochs=1)
    assert result.status == "completed"
    assert "the network is down" in caplog.text
    assert len(events(Path("run"), "metrics")) == 6


def test_a_checkpoint_that_cannot_be_written_ends_the_training_with_its_error(in_tmp: Path) -> None:
    class FillDisk(Callback):
        def on_train_start(self, trainer: Trainer) -> None:
            folder = Path("run/checkpoints")
            folder.rmdir()
            folder.write_text("in the way")

    with pytest.raises(CheckpointError, match="not saved"):
        trainer(None, FillDisk(), run_dir="run").train(loader(), epochs=2)
    assert events(Path("run"), "finish")[0]["status"] == "failed"


def test_an_error_while_another_is_on_its_way_is_only_logged(in_tmp: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Crash(Callback):
        def on_step_end(self, trainer: Trainer, step: int, loss: Tensor) -> None:
            if trainer.cursor.global_step == 1:
                trainer._session.store._error = CheckpointError("the disk is full")
                raise ValueError("mine")

    with caplog.at_level(logging.ERROR), pytest.raises(ValueError, match="mine"):
        trainer(None, Crash(), run_dir="run").train(loader(), epochs=1)
    assert "the disk is full" in caplog.text


def test_the_best_checkpoint_is_by_the_metric(in_tmp: Path) -> None:
    class Fake(Callback):
        def on_epoch_end(self, trainer: Trainer, epoch: int) -> None:
            trainer.log({"score": [1.0, 3.0, 2.0][epoch]})

    result = trainer(
        None, Fake(), run_dir="run", checkpoint__monitor="score", checkpoint__mode="max", checkpoint__keep=1
    ).train(loader(), epochs=3)
    assert result.best_checkpoint == Path("run/checkpoints/step-0000000012")


def test_metrics_of_any_number_type_can_be_logged(in_tmp: Path) -> None:
    class Odd(Callback):
        def on_epoch_end(self, trainer: Trainer, epoch: int) -> None:
            trainer.log({"a": np.float32(0.5), "b": torch.tensor(0.25), "c": 1})  # type: ignore[dict-item]

    result = trainer(None, Odd(), run_dir="run").train(loader(), epochs=1)
    assert result.status == "completed"


def test_a_config_is_needed_by_nobody_and_wrong_devices_are_named() -> None:
    with pytest.raises(ConfigError, match="no device"):
        Trainer(model(), device="toaster", run_dir=False)


def test_training_in_a_thread_is_possible(in_tmp: Path) -> None:
    """Signal handlers can only be set in the main thread."""
    import threading

    results = []
    thread = threading.Thread(target=lambda: results.append(trainer().train(loader(), epochs=1)))
    thread.start()
    thread.join(60)
    assert results[0].status == "completed"


COMPILED = """
import torch
from tests.training.examples import data, model, trainer
plain, compiled = model(), model()
trainer(plain, training__batch_size=22).train(data(), epochs=2)
own = trainer(compiled, training__batch_size=22, training__compile=True)
own.train(data(), data(), epochs=2)
assert own.engine.model is not compiled and type(own.engine.model).__name__ == "OptimizedModule"
assert plain.state_dict().keys() == compiled.state_dict().keys()
for a, b in zip(plain.parameters(), compiled.parameters()):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
"""


def test_a_compiled_model_trains_alike(tmp_path: Path) -> None:
    """In a process of its own: the compiler keeps processes and files."""
    import os

    root = Path(__file__).parents[2]
    environment = os.environ | {
        "PYTHONPATH": str(root),
        "TMPDIR": str(tmp_path),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_config_given_is_the_one_saved(in_tmp: Path) -> None:
    trainer(None, run_dir="run", training__seed=5).train(loader(), epochs=1)
    assert Config.from_file("run/config.yaml").training.seed == 5
    assert weights(model()).keys() == {"0.weight", "0.bias", "3.weight", "3.bias"}
