"""One process, one device: the reference for every other strategy."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from distributed_training.runtime.errors import ConfigError
from distributed_training.strategies.base import Place, StepResult, StepSettings, Strategy
from distributed_training.strategies.channels import turn_inputs, turn_weights, wants_channels_last
from distributed_training.strategies.fused import use_fused
from distributed_training.strategies.portable import (
    lay_out_state,
    load_model_state,
    load_optimizer_state,
    model_state,
    optimizer_state,
)
from distributed_training.strategies.precision import Precision
from distributed_training.strategies.update import Update


class SingleDevice(Strategy):
    """The whole batch on one CPU or GPU."""

    name = "single"

    def __init__(self, place: Place) -> None:
        if place.world.size > 1 and type(self) is SingleDevice:
            raise ConfigError(
                f"strategy=single is one process, but {place.world.launcher} started {place.world.size}; "
                "use strategy=auto, or start one"
            )
        self.device = place.device
        self.capturable = type(self) is SingleDevice and place.device.type == "cuda"
        self._precision: Precision | None = None
        self._turned_inputs: list[RemovableHandle] = []

    def setup(self, model: nn.Module, optimizer: Optimizer | None, settings: StepSettings) -> nn.Module:
        if self._precision is not None:
            self._precision.restore()
        self._precision = Precision(settings.precision, self.device)
        self._precision.apply()
        self._autocast = self._precision.autocast
        self._scaler = self._precision.scaler
        self._model = self.take_model(model, optimizer)
        self._leave_inputs()
        if wants_channels_last(self._model, self.device, self._precision.name, settings.channels_last):
            if self.keeps_channels_last:
                turn_weights(self._model)
            else:
                self._turned_inputs = turn_inputs(self._model)
        self._update: Update | None = None
        if optimizer is not None:
            self._update = self.make_update(optimizer, settings)
            lay_out_state(optimizer)  # it may have taken steps before the weights were turned
        return torch.compile(self._model) if settings.compile else self._model  # type: ignore[return-value]

    @property
    def keeps_channels_last(self) -> bool:
        """Whether weights may lie in another order than their shape says, or only activations may."""
        return type(self) is SingleDevice

    def take_model(self, model: nn.Module, optimizer: Optimizer | None) -> nn.Module:
        """Bring the weights where they belong, in place."""
        return model.to(self.device)

    def make_update(self, optimizer: Optimizer, settings: StepSettings) -> Update:
        """What turns gradients into new weights, once the model is where it belongs."""
        if settings.fused:
            use_fused(optimizer)
        return Update(optimizer, settings, self._scaler)

    def autocast(self) -> AbstractContextManager[Any]:
        return self._autocast

    def backward(self, loss: Tensor) -> None:
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()

    def step(self, loss: Tensor) -> StepResult:
        assert self._update is not None, "setup was called without an optimizer"
        return self._update(loss)

    def abandon_step(self) -> None:
        if self._scaler is not None:
            self._scaler._per_optimizer_states.clear()  # it would take the next step for the second half of this one
        if self._update is not None:
            self._update.abandon()

    def step_state(self) -> list[Tensor]:
        scaler = self._scaler
        found = [getattr(scaler, "_scale", None), getattr(scaler, "_growth_tracker", None)]
        return [tensor for tensor in found if isinstance(tensor, Tensor)]

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"model": model_state(self._model)}
        if self._update is not None:
            state["optimizer"] = optimizer_state(self._model, self._update.optimizer)
        if self._scaler is not None:
            state["scaler"] = self._scaler.state_dict()
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        load_model_state(self._model, state["model"])
        if self._update is not None and "optimizer" in state:
            load_optimizer_state(self._model, self._update.optimizer, state["optimizer"])
        if self._scaler is not None and "scaler" in state:
            self._scaler.load_state_dict(dict(state["scaler"]))

    def _leave_inputs(self) -> None:
        for handle in self._turned_inputs:
            handle.remove()
        self._turned_inputs = []

    def teardown(self) -> None:
        self._leave_inputs()
        if self._precision is not None:
            self._precision.restore()
