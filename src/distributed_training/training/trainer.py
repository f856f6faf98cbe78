"""`Trainer`: trains, evaluates and predicts with any of the accepted models, data and strategies."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from distributed_training.checkpoint import find_checkpoint, read_state
from distributed_training.config import Config
from distributed_training.config.load import config_from_environment
from distributed_training.data import Loader, Plan, as_source
from distributed_training.data.base import BatchSource, Share
from distributed_training.data.device_transform import Transform
from distributed_training.runtime.device import choose_device
from distributed_training.runtime.process import prepare_process
from distributed_training.runtime.run_directory import FROM_PYTHON, RunDirectory
from distributed_training.runtime.world import read_world
from distributed_training.strategies import Place, make_strategy
from distributed_training.strategies.base import Strategy
from distributed_training.training import evaluation
from distributed_training.training.activations import enable_gradient_checkpointing
from distributed_training.training.callbacks import Callback, EarlyStopping
from distributed_training.training.engine import Engine
from distributed_training.training.evaluation import Metrics
from distributed_training.training.forms import Criterion
from distributed_training.training.optimizers import build_optimizer
from distributed_training.training.result import Cursor, TrainingResult
from distributed_training.training.resume import check_same_base

logger = logging.getLogger(__name__)


class Trainer:
    """Trains a model.

        trainer = Trainer(model, torch.optim.AdamW(model.parameters()), device="cuda")
        trainer.train(train_loader, val_loader, epochs=50)

    Without a `config` the optimizer's learning rate stays as it is; with one, the config's schedule applies to it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        criterion: Criterion | None = None,
        device: str | torch.device | None = None,
        config: Config | None = None,
        callbacks: Sequence[Callback] = (),
        metrics: Metrics | None = None,
        run_dir: str | Path | bool | None = None,
        strategy: str | None = None,
        device_transform: Transform | None = None,
    ) -> None:
        """
        Args:
            model: any module in one of the three forms: outputs plus criterion, a dict with loss, an object with .loss.
            optimizer: left out, it is built from the config.
            criterion: `criterion(output, targets) -> mean loss`; left out, `training.loss` decides.
            device: auto, cpu, cuda, cuda:1; left out, `training.device` decides.
            config: all other settings; left out, the defaults with a constant learning rate.
            callbacks: see `Callback`.
            metrics: torchmetrics by name for evaluation, or a list of names; left out, `training.metrics`.
            run_dir: folder of the run; left out, a new one below `run.root`; False writes no files at all.
            strategy: single, ddp, zero3, ...; left out, `strategy.name` decides.
            device_transform: `function(batch) -> batch` on the device, before the model; it may take `ids`, `epoch`,
                `training` and `rng` (see `data.device_transform.BatchRandom`); left out, `data.device_transform`.
        """
        if config is None:
            config = config_from_environment({"training": {"schedule": "constant", "warmup_epochs": 0}}, "Trainer")
        if strategy is not None:
            config = config.replace(**{"strategy.name": strategy})
        self.config = config
        world = read_world()
        self.device = choose_device(str(device) if device is not None else config.training.device, world.local_rank)
        prepare_process(config, self.device)
        self.model, self.run_dir = model, run_dir
        self.metrics = metrics if metrics is not None else config.training.metrics or None
        self.callbacks = list(callbacks)
        if config.early_stopping.enabled and not any(isinstance(c, EarlyStopping) for c in self.callbacks):
            self.callbacks.append(EarlyStopping(config.early_stopping))
        if config.training.gradient_checkpointing:
            enable_gradient_checkpointing(model)
        self._place = Place(
            self.device,
            world,
            config.chosen_strategy(),
            config.run.deadline,
            config.training.batch_size,
            config.training.gradient_accumulation,
        )
        self.strategy = make_strategy(self._place)
        self._optimizer, self._criterion, self.device_transform = optimizer, criterion, device_transform
        self.from_config = False
        """Whether model and data were made from the config, so that the command line can make them again."""
        self.num_classes = getattr(model, "num_classes", None) or config.model.num_classes
        self.cursor = Cursor()
        self.epochs = config.training.epochs
        self.last_metrics: dict[str, float] = {}
        self._session: Any = None
        self._stop_reason = ""

    def train(
        self,
        train_loader: Any,
        val_loader: Any = None,
        epochs: int | None = None,
        *,
        scheduler: Any = None,
        resume: str | Path | None = None,
    ) -> TrainingResult:
        """Train for `epochs` in all, validating after each.

        Args:
            train_loader: a DataLoader (its samples are re-planned, so that resume is exact), a dataset, a tuple of
                arrays, a `Loader`, or any iterable of batches.
            val_loader: the same, for validation after each epoch.
            epochs: left out, `training.epochs`. A resumed run goes on up to this number.
            scheduler: a torch learning-rate scheduler, stepped after each step, in place of the config's schedule.
            resume: never, auto, or the path of a run or checkpoint; left out, `checkpoint.resume`.

        Ctrl-C and SIGTERM end the training at the next step with a checkpoint; its status is then `interrupted`.
        """
        from distributed_training.training.session import Session

        self.epochs = self.config.training.epochs if epochs is None else epochs
        self._stop_reason = ""
        source = self._source(train_loader, training=True)
        validation = self._source(val_loader, training=False) if val_loader is not None else None
        self._session = Session(self, source, validation, scheduler, str(resume or self.config.checkpoint.resume))
        try:
            return self._session.run()
        finally:
            for loader, own in ((source, source is not train_loader), (validation, validation is not val_loader)):
                if own and loader is not None:
                    loader.close()
            self._session = None

    def evaluate(self, data: Any, metrics: Metrics | None = None) -> dict[str, float]:
        """Mean loss and metrics over all of `data`, each sample once: `{'loss': 0.08, 'accuracy': 0.98}`."""
        engine = self.engine
        source = self._source(data, training=False)
        try:
            chosen = metrics if metrics is not None else self.metrics
            return evaluation.evaluate(engine, source, chosen)
        finally:
            if source is not data:
                source.close()

    def predict(self, data: Any) -> Any:
        """The model's outputs for all of `data` in its order, on the CPU: one tensor where outputs are tensors."""
        engine = self.engine
        source = self._source(data, training=False)
        try:
            return evaluation.predict(engine, source)
        finally:
            if source is not data:
                source.close()

    def gather_for_metrics(self, values: Any) -> Any:
        """Tensors of all ranks as one, rows in the order of the data, for metrics of your own.

        Takes any nesting of tensors. A sample that this rank holds only as padding is left out.
        """
        return evaluation.gather_rows(self.strategy, values, self.engine.batch)

    def load(self, path: str | Path) -> Path:
        """Take the weights of a checkpoint (a run's folder means its newest good one), and return its path."""
        found = find_checkpoint(Path(path))
        state = read_state(found.path)
        check_same_base(state, self.model, found.path)
        self.engine.strategy.load_state({"model": state["model"]})
        return found.path

    def enable_gradient_checkpointing(self) -> None:
        """Recompute activations in the backward pass instead of keeping them: less memory, more time."""
        enable_gradient_checkpointing(self.model)

    def close(self) -> None:
        """Leave the other ranks and give back process-wide settings. Not needed at the end of a program."""
        self.strategy.teardown()

    def stop(self, reason: str) -> None:
        """Ask the training to end after the current step."""
        self._stop_reason = reason

    def save(self) -> None:
        """Save a checkpoint of the running training now. For callbacks; the loop does it by the config."""
        if self._session is not None:
            self._session.save()

    def log(self, metrics: Mapping[str, float]) -> None:
        """Give metrics to the trackers and callbacks of the running training."""
        if self._session is not None:
            self._session.log(metrics)

    @functools.cached_property
    def engine(self) -> Engine:
        """The model under the strategy; the first use sets it up."""
        self.model.to(self.device)
        parts = (self.model, self.optimizer, self.strategy, self._criterion, self.config)
        return Engine(*parts, self.device_transform)

    def another_strategy(self) -> Strategy:
        """One of the same kind, to try something with."""
        return make_strategy(self._place)

    @property
    def criterion(self) -> Criterion | None:
        """What outputs are judged by, where that was given in Python."""
        return self._criterion

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, built from the config if none was given."""
        if self._optimizer is None:
            self._optimizer = build_optimizer(self.model.to(self.device), self.config.training)
        return self._optimizer

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole training, where the data says how many."""
        return self._session.total_steps if self._session is not None else None

    @property
    def run_directory(self) -> RunDirectory | None:
        """Folder of the running training, on the rank that writes it."""
        return self._session.run_dir if self._session is not None else None

    @property
    def stopping(self) -> str:
        """Why the training is to end early, or nothing. The same on all ranks."""
        if self._session is not None and self.strategy.world_size > 1:
            return str(self._session.agreed)
        return self.own_wish_to_stop

    @property
    def own_wish_to_stop(self) -> str:
        """Why this process wants to stop: a signal it received, or what was given to `stop`."""
        if self._session is not None and self._session.signals.received is not None:
            return str(self._session.signals.received.name)
        return self._stop_reason

    def recorded_config(self, source: BatchSource | None = None) -> Config:
        """The config that is true of this training: what was given in Python takes the place of what it says."""
        given: dict[str, Any] = {"training.epochs": self.epochs}
        if not self.from_config:
            kind = type(self.model)
            given |= {"model.target": f"{kind.__module__}:{kind.__qualname__}", "data.dataset": FROM_PYTHON}
            plan = getattr(source, "plan", None)
            if isinstance(plan, Plan):
                size = plan.batch_size
                given["training.batch_size"] = size
                given["training.gradient_accumulation"] = min(self.config.training.gradient_accumulation, size)
        return self.config.replace(**given)

    def notify(self, event: str, *args: Any) -> None:
        """Call a method of every callback."""
        for callback in self.callbacks:
            getattr(callback, event)(self, *args)

    def _source(self, data: Any, *, training: bool) -> BatchSource:
        training_, data_ = self.config.training, self.config.data
        plan = Plan(0, training_.batch_size, training_.seed, data_.shuffle, data_.drop_last)
        pin = self.device.type == "cuda" if data_.pin_memory is None else data_.pin_memory
        source = as_source(
            data,
            plan,
            every_sample=not training,
            pin_memory=pin,
            deadline=self.config.run.deadline,
            resident=data_.resident,
        )
        ranks = self.strategy.world_size
        if not training and isinstance(source, Loader) and len(source.dataset) < ranks:
            ranks = 1  # fewer samples than ranks: each looks at all of them
        source.share = Share(self.strategy.rank if ranks > 1 else 0, ranks)
        source.device = self.strategy.device
        source.epochs = self.epochs if training else None
        return source
