"""A training job from a config alone: dataset, model and trainer put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from distributed_training.config import Config
from distributed_training.data import Dataset, Loader, Plan, PreprocessedDataset, Splits
from distributed_training.data.nested import tensors_in
from distributed_training.data.sources import load_dataset
from distributed_training.models import build_model
from distributed_training.models.huggingface import name_labels
from distributed_training.runtime.device import choose_device
from distributed_training.runtime.imports import import_object
from distributed_training.runtime.seeds import seed_everything
from distributed_training.training.callbacks import Callback
from distributed_training.training.result import TrainingResult
from distributed_training.training.trainer import Trainer


@dataclass
class Job:
    """What a config describes, ready to run."""

    trainer: Trainer
    train_data: Loader
    val_data: Loader | None

    def train(self) -> TrainingResult:
        """Train as configured."""
        return self.trainer.train(self.train_data, self.val_data)

    def close(self) -> None:
        """End loader processes."""
        self.train_data.close()
        if self.val_data is not None:
            self.val_data.close()
        self.trainer.close()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def build_job(config: Config, run_dir: str | Path | bool | None = None, data: Splits | None = None) -> Job:
    """Load the data, unless it is given, build the model and make a trainer."""
    data = load_data(config) if data is None else data
    trainer = build_trainer(config, data.train.num_classes, sample_shape(data.train), run_dir)
    name_labels(trainer.model, data.train.classes)
    return Job(trainer, make_loader(data.train, config, training=True), _validation_loader(data.validation, config))


def load_data(config: Config) -> Splits:
    """The data that a config names, preprocessed as it says."""
    splits = load_dataset(config.data)
    train, validation = _preprocessed(splits.train, config), _preprocessed(splits.validation, config)
    assert train is not None
    return Splits(train, validation)


def build_trainer(
    config: Config,
    num_classes: int | None,
    input_shape: tuple[int, ...] | None,
    run_dir: str | Path | bool | None = None,
    callbacks: Sequence[Callback] = (),
) -> Trainer:
    """The model that a config names, for data of this kind, and a trainer for it."""
    seed_everything(config.training.seed)  # the weights are a function of the seed, whatever was loaded before
    model = build_model(config.model, num_classes=num_classes, input_shape=input_shape)
    trainer = Trainer(model, config=config, run_dir=run_dir, callbacks=callbacks)
    trainer.from_config = True
    if trainer.num_classes is None:
        trainer.num_classes = num_classes
    return trainer


def make_plan(dataset: Dataset, config: Config, *, training: bool) -> Plan:
    """How a dataset is divided into steps: as configured for training, every sample in order otherwise."""
    size = config.training.batch_size
    if training:
        return Plan(len(dataset), size, config.training.seed, config.data.shuffle, config.data.drop_last)
    return Plan(len(dataset), max(min(size, len(dataset)), 1), config.training.seed, shuffle=False)


def make_loader(dataset: Dataset, config: Config, *, training: bool) -> Loader:
    """A loader as configured: planned for training, every sample in order otherwise."""
    plan = make_plan(dataset, config, training=training)
    pin = config.data.pin_memory
    if pin is None:
        pin = choose_device(config.training.device).type == "cuda"
    return Loader(
        dataset,
        plan,
        num_workers=config.data.num_workers,
        pin_memory=pin,
        deadline=config.run.deadline,
        resident=config.data.resident,
    )


def sample_shape(dataset: Dataset) -> tuple[int, ...] | None:
    """The shape of one sample's input."""
    if len(dataset) == 0:
        return None
    if dataset.input_shape is not None:
        return dataset.input_shape
    first: Any = next(tensors_in(dataset.fetch(np.zeros(1, dtype=np.int64))), None)
    return tuple(first.shape[1:]) if first is not None else None


def _preprocessed(dataset: Dataset | None, config: Config) -> Dataset | None:
    if dataset is None or config.data.preprocess is None:
        return dataset
    function = import_object(config.data.preprocess, "data.preprocess")
    return PreprocessedDataset(dataset, function, name=config.data.preprocess)


def _validation_loader(dataset: Dataset | None, config: Config) -> Loader | None:
    return make_loader(dataset, config, training=False) if dataset is not None else None
