"""The engine of a stepwise training: the loss comes with every step, and inputs may be the model's arguments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from distributed_training.config import Config
from distributed_training.data.base import Batch
from distributed_training.data.nested import batch_length, to_device
from distributed_training.strategies.base import Strategy
from distributed_training.training.criteria import PartLoss
from distributed_training.training.engine import Engine
from distributed_training.training.forms import Answer


class StepEngine(Engine):
    """Calls the model as a user's own loop would: `criterion(model(inputs), targets)`."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, strategy: Strategy, config: Config) -> None:
        super().__init__(model, optimizer, strategy, None, config)
        self.loss: PartLoss
        """What the outputs are judged by. To be set before each step."""
        self._signature = inspect.signature(model.forward)

    def place(self, batch: Batch, epoch: int = 0, *, training: bool = False) -> Any:
        """The batch's data on the device, as it is: whoever has a loop of their own has prepared it."""
        self.batch = batch
        return to_device(batch.data, self.strategy.device) if self._moves else batch.data

    def judged(self, data: Any) -> None:
        """Nothing: losses come weighted by samples already, see `training.criteria`."""

    def answer(self, data: Any, *, need_loss: bool = True) -> Answer:
        inputs, targets = data
        output = self._call(inputs)
        return Answer(self.loss(output, targets, batch_length(inputs)) if need_loss else None, output, targets)

    def _call(self, inputs: Any) -> Any:
        """A dict or tuple becomes the arguments of `forward`, where that takes them so; else it is the one argument."""
        if isinstance(inputs, Mapping) and self._takes((), inputs):
            return self.model(**inputs)
        if isinstance(inputs, (tuple, list)) and self._takes(inputs, {}):
            return self.model(*inputs)
        return self.model(inputs)

    def _takes(self, arguments: Any, named: Mapping[str, Any]) -> bool:
        try:
            self._signature.bind(*arguments, **named)
        except TypeError:
            return False
        return True
