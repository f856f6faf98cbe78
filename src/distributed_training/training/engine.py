"""The model under its strategy, and how a batch meets it: to the device, transformed, forward, loss.

Training, evaluation and prediction share it, so that they cannot differ in any of this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distributed_training.config import Config
from distributed_training.data.augment import ImageTransform
from distributed_training.data.base import Batch
from distributed_training.data.device_transform import DeviceTransform, Transform
from distributed_training.data.nested import to_device
from distributed_training.data.resident import ResidentRows
from distributed_training.data.sources import device_part
from distributed_training.runtime.imports import import_object
from distributed_training.strategies.base import StepSettings, Strategy
from distributed_training.training.forms import Answer, Criterion, Forms
from distributed_training.training.judged import Judged


class Engine:
    """Runs a model on batches. Made once for a model, an optimizer and a strategy."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        strategy: Strategy,
        criterion: Criterion | None,
        config: Config,
        device_transform: Transform | None = None,
    ) -> None:
        training = config.training
        settings = StepSettings(
            precision=training.precision,
            gradient_clip=training.gradient_clip,
            nonfinite=training.nonfinite,
            compile=training.compile == "on",
            channels_last=training.channels_last,
            fused=training.fused,
        )
        self.strategy = strategy
        self.plain_model, self.optimizer = model, optimizer
        """As they were given."""
        self.precision = training.precision
        self._compiled: Any = None
        self.model = strategy.setup(model, optimizer, settings)
        """What the forward pass calls: the user's model, perhaps wrapped or compiled."""
        self.autocast = strategy.autocast()
        self._forms = Forms(model, criterion, training.loss)
        self.targets = Judged(model)
        """Which of the targets of a batch are judged."""
        self._own_transform = _own_transform(config, device_transform, strategy)
        self._transform = ImageTransform(config.data.augment, training.seed)
        self._moves = strategy.device.type != "cpu"
        self.batch: Batch | None = None
        """The batch that was placed last."""

    def place(self, batch: Batch, epoch: int = 0, *, training: bool = False) -> Any:
        """The batch's data on the device, transformed there; augmented only in training."""
        self.batch = batch
        data = batch.data
        if isinstance(data, ResidentRows):
            data = data.gather()
        elif self._moves:
            data = to_device(data, self.strategy.device)
        if self._own_transform is not None:
            data = self._own_transform(data, batch.ids, epoch, training=training)
        return self._transform(data, batch.ids, epoch, training=training)

    @contextmanager
    def compiled(self) -> Iterator[None]:
        """Within it the model runs through torch.compile, for batches of one shape."""
        plain = self.model
        if self._compiled is None:
            self._compiled = torch.compile(plain, dynamic=False)
        self.model = self._compiled
        try:
            yield
        finally:
            self.model = plain

    def judged(self, data: Any) -> Tensor | None:
        """How many targets the loss of placed data is the mean of; None where each sample counts once."""
        return self.targets.count(data)

    @property
    def transforms_alone(self) -> bool:
        """Whether what `place` makes of samples depends on nothing but them: it may be part of a recorded step."""
        return self._own_transform is None and not self._transform.draws

    def transform(self, data: Any) -> Any:
        """What `place` makes of samples on the device, where it `transforms_alone`."""
        return self._transform(data, np.empty(0), 0, training=True)

    def answer(self, data: Any, *, need_loss: bool = True) -> Answer:
        """What the model says about placed data. To be called inside `autocast`."""
        return self._forms(self.model, data, need_loss=need_loss)


def _own_transform(config: Config, given: Transform | None, strategy: Strategy) -> DeviceTransform | None:
    """What the dataset leaves to this side, then what the user wants done: given in Python, or named by the config."""
    own = given
    if own is None and config.data.device_transform is not None:
        own = import_object(config.data.device_transform, "data.device_transform")
    functions = [function for function in (device_part(config.data), own) if function is not None]
    return DeviceTransform(functions, config.training.seed, strategy.device) if functions else None
