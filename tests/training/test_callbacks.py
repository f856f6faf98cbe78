"""Callbacks are told in order, can end the training, and come back with a checkpoint."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.training.examples import config, loader, model, trainer

from distributed_training.config import EarlyStoppingConfig
from distributed_training.training import Callback, EarlyStopping, Trainer


class Diary(Callback):
    def __init__(self, name: str = "") -> None:
        self.name, self.told = name, []

    def on_train_start(self, trainer: Trainer) -> None:
        self.told.append(f"{self.name}start")

    def on_epoch_start(self, trainer: Trainer, epoch: int) -> None:
        self.told.append(f"{self.name}epoch {epoch}")

    def on_step_end(self, trainer: Trainer, step: int, loss: Any) -> None:
        self.told.append(f"{self.name}step {step}")

    def on_log(self, trainer: Trainer, metrics: Any) -> None:
        self.told.append(f"{self.name}log {'val' if 'val_loss' in metrics else 'train'}")

    def on_validation_end(self, trainer: Trainer, metrics: Any) -> None:
        self.told.append(f"{self.name}validated {sorted(metrics)}")

    def on_epoch_end(self, trainer: Trainer, epoch: int) -> None:
        self.told.append(f"{self.name}epoch {epoch} done")

    def on_epoch_saved(self, trainer: Trainer, epoch: int) -> None:
        self.told.append(f"{self.name}epoch {epoch} saved, next is {trainer.cursor.epoch}")

    def on_train_end(self, trainer: Trainer, status: str) -> None:
        self.told.append(f"{self.name}{status}")


def test_events_come_in_this_order() -> None:
    diary = Diary()
    trainer(None, diary).train(loader(16), loader(8), epochs=1)
    assert diary.told == [
        "start",
        "epoch 0",
        "step 0",
        "log train",
        "step 1",
        "log train",
        "log val",
        "validated ['val_accuracy', 'val_loss']",
        "epoch 0 done",
        "epoch 0 saved, next is 1",
        "completed",
    ]


def test_callbacks_are_called_in_the_order_of_the_list() -> None:
    told: list[str] = []
    first, second = Diary("1 "), Diary("2 ")
    first.told = second.told = told
    trainer(None, first, second).train(loader(8), epochs=1)
    assert told[:4] == ["1 start", "2 start", "1 epoch 0", "2 epoch 0"]
    assert told[-2:] == ["1 completed", "2 completed"]


@pytest.mark.parametrize(
    ("event", "steps"),
    [
        ("on_train_start", 0),
        ("on_epoch_start", 1),
        ("on_step_end", 1),
        ("on_log", 1),
        ("on_validation_end", 6),
        ("on_epoch_end", 6),
    ],
)
def test_any_event_can_stop_the_training_after_the_current_step(event: str, steps: int) -> None:
    class Stop(Callback):
        pass

    setattr(Stop, event, lambda self, trainer, *args: trainer.stop("enough"))
    result = trainer(None, Stop()).train(loader(), loader(8), epochs=3)
    assert (result.status, result.reason, result.steps) == ("stopped early", "enough", steps)


def test_an_exception_ends_the_training_and_everyone_hears() -> None:
    class Bad(Callback):
        def on_epoch_start(self, trainer: Trainer, epoch: int) -> None:
            raise ValueError("my mistake")

    diary = Diary()
    own = trainer(None, Bad(), diary)
    with pytest.raises(ValueError, match="my mistake"):
        own.train(loader(), epochs=1)
    assert diary.told == ["start", "failed"]


def test_the_display_does_not_stay_among_the_callbacks(capsys: pytest.CaptureFixture[str]) -> None:
    diary = Diary()
    own = trainer(None, diary, run__progress="plain")
    own.train(loader(8), epochs=1)
    assert own.callbacks == [diary]


class Counter(Callback):
    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, trainer: Trainer, step: int, loss: Any) -> None:
        self.steps += 1

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state(self, state: Any) -> None:
        self.steps = state["steps"]


def test_what_a_callback_remembers_is_in_the_checkpoint(in_tmp: Path) -> None:
    Trainer(model(), config=config(), callbacks=[Counter()], run_dir="run").train(loader(), epochs=1)
    again = Counter()
    Trainer(model(), config=config(), callbacks=[again], run_dir="run").train(loader(), epochs=2, resume="auto")
    assert again.steps == 12


def test_a_callback_can_save_and_log(in_tmp: Path) -> None:
    class Mine(Callback):
        def on_step_end(self, trainer: Trainer, step: int, loss: Any) -> None:
            if step == 2:
                trainer.save()
                trainer.log({"mine": 7.0})

    result = Trainer(model(), config=config(checkpoint__keep=9), callbacks=[Mine()], run_dir="run").train(
        loader(), epochs=1
    )
    assert result.metrics["mine"] == 7.0
    assert [p.name for p in sorted(Path("run/checkpoints").iterdir())] == ["step-0000000003", "step-0000000006"]


class TestEarlyStopping:
    def run(self, values: list[float], **settings: Any) -> tuple[EarlyStopping, str]:
        stopper = EarlyStopping(**settings)
        said: list[str] = []
        for value in values:
            stopper.on_validation_end(SimpleNamespace(stop=said.append), {"val_loss": value, "val_accuracy": value})  # type: ignore[arg-type]
        return stopper, said[0] if said else ""

    def test_waits_for_patience_validations(self) -> None:
        assert self.run([1.0, 1.1, 1.2], patience=3)[1] == ""
        assert self.run([1.0, 1.1, 1.2, 1.3], patience=3)[1] == "val_loss has not improved for 3 validations"

    def test_an_improvement_starts_the_wait_anew(self) -> None:
        stopper, said = self.run([1.0, 1.1, 0.9, 1.0], patience=2)
        assert (said, stopper.waited, stopper.best) == ("", 1, 0.9)

    def test_large_values_can_be_good(self) -> None:
        assert self.run([0.5, 0.6, 0.7], patience=1, monitor="val_accuracy", mode="max")[1] == ""
        assert self.run([0.7, 0.6], patience=1, monitor="val_accuracy", mode="max")[1] != ""

    def test_small_changes_may_not_count(self) -> None:
        assert self.run([1.0, 0.95], patience=1, min_delta=0.1)[1] != ""
        assert self.run([1.0, 0.85], patience=1, min_delta=0.1)[1] == ""
        assert self.run([0.5, 0.55], patience=1, min_delta=0.1, monitor="val_accuracy", mode="max")[1] != ""

    def test_equal_is_no_improvement(self) -> None:
        assert self.run([1.0, 1.0], patience=1)[1] != ""

    def test_nan_is_no_improvement(self) -> None:
        assert self.run([1.0, math.nan, math.nan], patience=2)[1] != ""

    def test_a_metric_that_is_not_there_is_warned_about(self, caplog: pytest.LogCaptureFixture) -> None:
        assert self.run([1.0, 1.0, 1.0], patience=1, monitor="val_f1")[1] == ""
        assert "early_stopping.monitor=val_f1 is not among val_loss, val_accuracy" in caplog.text

    def test_its_state_comes_back(self) -> None:
        stopper, _ = self.run([1.0, 1.1], patience=5)
        again = EarlyStopping(EarlyStoppingConfig(enabled=True))
        again.load_state(stopper.state())
        assert (again.best, again.waited) == (1.0, 1)

    def test_the_config_turns_it_on(self) -> None:
        result = trainer(early_stopping__enabled=True, early_stopping__patience=1, early_stopping__min_delta=9.0).train(
            loader(), loader(8), epochs=5
        )
        assert (result.status, result.epochs) == ("stopped early", 2)
        assert "val_loss has not improved" in result.reason

    def test_the_users_own_is_not_doubled(self) -> None:
        own = EarlyStopping(patience=3)
        assert trainer(None, own, early_stopping__enabled=True).callbacks == [own]
