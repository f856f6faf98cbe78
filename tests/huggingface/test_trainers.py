"""The two trainers in one process: the same results, those of transformers' Trainer, settings, what they refuse."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.huggingface.cases import BATCH, Losses, make_data, make_model

from distributed_training import AcceleratedTrainer, BasicTrainer, Config, Plan
from distributed_training.huggingface import evaluate
from distributed_training.huggingface.columns import as_planned
from distributed_training.runtime.errors import ConfigError, DataError

transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")
TASK = "sequence_classification"
SAME = {"epochs": 2, "batch_size": BATCH, "lr": 1e-3, "weight_decay": 0.1, "device": "cpu"}


@pytest.fixture
def rows(tiny: Path) -> Any:
    """A tokenised dataset as users have it: lists of unequal length, and a column that no model takes."""
    data = make_data(TASK, 500)
    columns = data.fetch(torch.arange(len(data)).numpy())
    lengths = columns["attention_mask"].sum(1).tolist()
    return datasets.Dataset.from_dict(
        {
            "input_ids": [row[:n] for row, n in zip(columns["input_ids"].tolist(), lengths)],
            "label": columns["labels"].tolist(),
            "source": ["somewhere"] * len(data),
        }
    )


@pytest.fixture
def tokenizer(tiny: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(tiny / "sequence-classification")


def train(kind: Any, tiny: Path, rows: Any, tokenizer: Any, **more: Any) -> tuple[list[float], dict[str, float]]:
    losses = Losses()
    with kind(
        make_model(tiny, TASK), rows, rows, tokenizer=tokenizer, callbacks=[losses], run_dir=False, **SAME, **more
    ) as trainer:
        trainer.train()
        return losses.values, trainer.evaluate()


def test_both_have_the_losses_of_transformers_trainer(
    tiny: Path, rows: Any, tokenizer: Any, in_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.utils.logging, "_tqdm_active", False)
    basic, judged = train(BasicTrainer, tiny, rows, tokenizer)
    accelerated, also = train(AcceleratedTrainer, tiny, rows, tokenizer)
    assert accelerated == basic
    assert also == judged
    assert {"loss", "accuracy"} <= judged.keys()

    found: list[float] = []

    class Recording(transformers.Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return Planned(len(rows))

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            found.append(float(loss))
            return loss

    arguments = transformers.TrainingArguments(
        output_dir="theirs",
        num_train_epochs=SAME["epochs"],
        per_device_train_batch_size=BATCH,
        learning_rate=SAME["lr"],
        weight_decay=SAME["weight_decay"],
        lr_scheduler_type="linear",
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    theirs = Recording(
        make_model(tiny, TASK),
        arguments,
        train_dataset=rows.rename_column("label", "labels").remove_columns("source"),
        data_collator=transformers.DataCollatorWithPadding(tokenizer),
    )
    theirs.train()
    assert basic == pytest.approx(found, abs=1e-4)


class Planned(torch.utils.data.Sampler[int]):
    """Our order of the samples."""

    def __init__(self, samples: int) -> None:
        self._plan, self._epoch = Plan(samples, BATCH), 0

    def __len__(self) -> int:
        return self._plan.samples

    def __iter__(self) -> Iterator[int]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        for step in range(self._plan.steps_per_epoch):
            yield from self._plan.ids(epoch, step).tolist()


def test_a_run_is_saved_and_judged_by_itself(tiny: Path, rows: Any, tokenizer: Any, in_tmp: Path) -> None:
    with BasicTrainer(
        make_model(tiny, TASK), rows, rows, tokenizer=tokenizer, run_dir="run", log_with="tensorboard", **SAME
    ) as trainer:
        result = trainer.train()
        folder = trainer.save_model("model")
        expected = trainer.evaluate()
        assert len(trainer.predict(rows)) == len(rows)

    assert result.run_dir == Path("run")
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    assert evaluate(loaded, rows, tokenizer=tokenizer, device="cpu")["loss"] == pytest.approx(
        expected["loss"], abs=1e-6
    )
    assert Config.from_file("run/config.yaml").tracking.trackers == ["tensorboard"]
    assert json.loads((folder / "tokenizer_config.json").read_text())


def test_settings_have_the_defaults_of_transformers_and_the_environments_word(
    tiny: Path, rows: Any, tokenizer: Any, in_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTRAIN_TRAINING__EPOCHS", "5")
    model = make_model(tiny, TASK)
    with BasicTrainer(model, rows, tokenizer=tokenizer, learning_rate=1e-4) as trainer:
        training = trainer.trainer.config.training
    assert (training.epochs, training.lr, training.schedule, training.gradient_clip) == (5, 1e-4, "linear", 1.0)
    assert (training.type, trainer.trainer.strategy.name) == ("basic", "single")


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (BasicTrainer, {"zero_stage": 2}, "training.type=basic is one device: use training.type=accelerated"),
        (BasicTrainer, {"epoch": 3}, "BasicTrainer takes no epoch=; did you mean epochs"),
        (AcceleratedTrainer, {"zero_stage": 4}, "zero_stage=4 must be one of"),
        (BasicTrainer, {"log_with": "wand"}, "unknown tracker 'wand'; did you mean wandb"),
        (BasicTrainer, {"config": Config.from_dict({"strategy": "ddp"})}, "training.type=basic means strategy=single"),
    ],
)
def test_what_cannot_be_is_refused(
    tiny: Path, rows: Any, tokenizer: Any, in_tmp: Path, kind: Any, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(make_model(tiny, TASK), rows, tokenizer=tokenizer, **arguments).train()


def test_data_that_is_not_ready_is_refused(tiny: Path, rows: Any, tokenizer: Any) -> None:
    with pytest.raises(DataError, match="need a tokenizer that knows what to pad with"):
        as_planned(rows)
    with pytest.raises(DataError, match="neither input_ids nor pixel_values: tokenise it first"):
        as_planned(rows.remove_columns("input_ids"), tokenizer)
    with pytest.raises(DataError, match="no labels to train on"):
        as_planned(rows.remove_columns("label"), tokenizer)
    with pytest.raises(DataError, match="nothing to train on"):
        BasicTrainer(make_model(tiny, TASK), run_dir=False).train()
    padded = rows.map(lambda row: tokenizer.pad({"input_ids": row["input_ids"]}, padding="max_length", max_length=16))
    batch = as_planned(padded, tokenizer).fetch(torch.arange(3).numpy())
    assert batch["attention_mask"].sum(1).tolist() == [len(rows[n]["input_ids"]) for n in range(3)]
