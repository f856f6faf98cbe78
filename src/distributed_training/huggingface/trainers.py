"""`BasicTrainer` and `AcceleratedTrainer`: the trainer of this package in the words of Hugging Face users.

Both are faces of `training.Trainer` and its one loop. They differ in the strategy: one device, or Accelerate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from distributed_training.config import Config
from distributed_training.config.check import did_you_mean
from distributed_training.config.config import known_keys
from distributed_training.config.load import config_from_environment
from distributed_training.huggingface.card import Card
from distributed_training.huggingface.columns import as_planned
from distributed_training.huggingface.publish import push
from distributed_training.huggingface.saving import save
from distributed_training.runtime.errors import ConfigError, DataError
from distributed_training.training import Callback, Trainer, TrainingResult

# Those of transformers' TrainingArguments, under our names.
DEFAULTS = {
    "epochs": 3,
    "batch_size": 8,
    "lr": 5e-5,
    "weight_decay": 0.0,
    "schedule": "linear",
    "warmup_epochs": 0.0,
    "gradient_clip": 1.0,
}
_SETTINGS = sorted(key.removeprefix("training.") for key in known_keys() if key.startswith("training."))


class BasicTrainer:
    """Trains a model of transformers, or any other, on one device.

    trainer = BasicTrainer(model, data["train"], data["validation"], tokenizer=tokenizer, epochs=3)
    trainer.train()
    trainer.save_model("my-model")
    trainer.push_to_hub("me/my-model")
    """

    kind: ClassVar[str] = "basic"

    def __init__(
        self,
        model: nn.Module,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        tokenizer: Any = None,
        metrics: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callback] = (),
        config: Config | None = None,
        run_dir: str | Path | bool | None = None,
        zero_stage: int | None = None,
        log_with: str | Sequence[str] | None = None,
        **settings: Any,
    ) -> None:
        """
        Args:
            model: what `load_model` gives, or any module in one of the forms that `Trainer` accepts.
            train_dataset: what `process` gives, a tokenised `datasets.Dataset`, or what `Trainer.train` takes.
            eval_dataset: the same, for validation after each epoch.
            tokenizer: pads a `datasets.Dataset` of texts of unequal length; saved beside the model.
            metrics: torchmetrics by name; left out, those that fit the model.
            callbacks: see `Callback`.
            config: all settings; left out, the defaults of transformers' Trainer and DTRAIN_ variables over them.
            run_dir: folder of the run; left out, a new one below `run.root`; False writes no files at all.
            zero_stage: 1, 2 or 3: DeepSpeed's ZeRO. AcceleratedTrainer only.
            log_with: wandb, tensorboard, or several.
            settings: those of the `training` section, such as epochs=3, batch_size=16, lr=2e-5, precision="bf16".
        """
        self.tokenizer = tokenizer
        self._train, self._eval = train_dataset, eval_dataset
        config = _config(config, type(self).__name__, self._given(settings, zero_stage, log_with))
        self.trainer = Trainer(model, config=config, callbacks=callbacks, metrics=metrics, run_dir=run_dir)
        """The trainer behind this face, with all that it can do."""
        self.result: TrainingResult | None = None
        """What the last `train` came to."""

    @property
    def model(self) -> nn.Module:
        """The model, trained in place."""
        return self.trainer.model

    def train(self, resume: str | Path | None = None) -> TrainingResult:
        """Train as configured; `resume` is never, auto, or the path of a run or checkpoint."""
        if self._train is None:
            raise DataError(f"{type(self).__name__} has nothing to train on; give it train_dataset=")
        self.result = self.trainer.train(self._data(self._train), self._data(self._eval), resume=resume)
        return self.result

    def evaluate(self, dataset: Any = None) -> dict[str, float]:
        """Mean loss and metrics over `dataset`, or else over eval_dataset: `{'loss': 0.31, 'accuracy': 0.92}`."""
        chosen = dataset if dataset is not None else self._eval
        if chosen is None:
            raise DataError(f"{type(self).__name__} has nothing to evaluate on; give it eval_dataset=")
        return self.trainer.evaluate(self._data(chosen))

    def predict(self, dataset: Any) -> Any:
        """The model's outputs for all of `dataset` in its order, on the CPU."""
        return self.trainer.predict(self._data(dataset))

    def save_model(self, folder: str | Path, *, merge: bool = False) -> Path:
        """Write the model and the tokenizer as `save_pretrained` does, gathered from all processes.

        `merge` adds adapters to the weights they belong to, so that the folder needs no peft to be loaded.
        """
        strategy = self.trainer.engine.strategy
        weights = strategy.state().get("model")  # all ranks have a part in it
        folder = Path(folder)
        if strategy.rank == 0:
            save(self.model, folder, tokenizer=self.tokenizer, weights=weights, merge=merge)
        strategy.barrier()  # nobody reads it before it is there
        return folder

    def push_to_hub(self, repo: str, *, private: bool = False, merge: bool = False) -> str:
        """Publish the model with a card that says what it is; gives its address on the Hub."""
        import tempfile

        with tempfile.TemporaryDirectory(prefix="dtrain-push-") as temporary:
            # Every rank has a temporary folder, of which rank 0's is filled.
            folder = self.save_model(Path(temporary) / "model", merge=merge)
            address = ""
            if self.trainer.strategy.rank == 0:
                card = Card.of_training(self.model, self.trainer.config, self.trainer.last_metrics)
                card.write(folder, repo)
                address = push(folder, repo, private=private)
            return str(self.trainer.strategy.gather_values(address)[0])

    def close(self) -> None:
        """Leave the other ranks and give back process-wide settings."""
        self.trainer.close()

    def __enter__(self) -> BasicTrainer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _given(self, settings: dict[str, Any], zero_stage: int | None, log_with: Any) -> dict[str, Any]:
        """What the arguments say, by dotted key."""
        for name in settings:
            if name not in (*_SETTINGS, "learning_rate"):
                hint = did_you_mean(name, _SETTINGS) or "; see the training section in docs/configuration.md"
                raise ConfigError(f"{type(self).__name__} takes no {name}={hint}")
        given = {f"training.{'lr' if name == 'learning_rate' else name}": v for name, v in settings.items()}
        given["training.type"] = self.kind
        if zero_stage is not None:
            given["strategy.zero_stage"] = zero_stage
        if log_with is not None:
            given["tracking.trackers"] = [log_with] if isinstance(log_with, str) else list(log_with)
        return given

    def _data(self, data: Any) -> Any:
        return as_planned(data, self.tokenizer) if data is not None else None


class AcceleratedTrainer(BasicTrainer):
    """As `BasicTrainer`, on as many processes as `accelerate launch`, torchrun or `dtrain launch` started.

    Accelerate runs the steps; with `zero_stage` DeepSpeed divides optimizer state, gradients and weights among them.
    """

    kind = "accelerated"


def _config(config: Config | None, name: str, given: Mapping[str, Any]) -> Config:
    if config is not None:
        return config.replace(**given)
    values: dict[str, Any] = {"training": dict(DEFAULTS)}
    for key, value in given.items():
        section, _, setting = key.partition(".")
        values.setdefault(section, {})[setting] = value
    return config_from_environment(values, name)
