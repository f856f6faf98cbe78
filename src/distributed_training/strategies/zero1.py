"""ZeRO stage 1: ddp, but each rank keeps the optimizer's state of its own part of the parameters, and updates only it.

torch's ZeroRedundancyOptimizer divides the parameters and sends the updated ones round. The optimizer that it drives on
each rank is the user's own, left with that rank's parameters: learning rates set on it, hooks and arguments of its own
count as always.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from distributed_training.runtime.errors import ModelError
from distributed_training.strategies.base import StepSettings
from distributed_training.strategies.ddp import DDP, SameGradients
from distributed_training.strategies.fused import use_fused
from distributed_training.strategies.gathering import fetch_to_rank_0
from distributed_training.strategies.portable import (
    check_optimizer_state,
    load_optimizer_state,
    parameter_names,
)
from distributed_training.strategies.update import Update


class Zero1(DDP):
    """Every rank has all weights and gradients, and of Adam's two further copies only its part."""

    name = "zero1"

    def make_update(self, optimizer: Optimizer, settings: StepSettings) -> Update:
        if settings.fused:
            use_fused(optimizer)
        names = iter(parameter_names(self._model, optimizer))
        self._members = [[next(names) for _ in group["params"]] for group in optimizer.param_groups]
        return _DividedUpdate(optimizer, settings, self._scaler, self)

    def state(self) -> dict[str, Any]:
        state = super().state()
        if self._update is not None:
            state["optimizer"]["state"] = self._gathered(state["optimizer"]["state"])
            for group, members in zip(state["optimizer"]["groups"], self._members):
                group["params"] = members
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        if self._update is None or "optimizer" not in state:
            super().load_state(state)
            return
        super().load_state({key: value for key, value in state.items() if key != "optimizer"})
        whole = state["optimizer"]
        check_optimizer_state(self._update.optimizer, self._members, whole)
        own = set(parameter_names(self._model, self._update.optimizer))
        part = {
            "kind": whole["kind"],
            "state": {name: values for name, values in whole["state"].items() if name in own},
            "groups": [{**group, "params": [n for n in group["params"] if n in own]} for group in whole["groups"]],
        }
        load_optimizer_state(self._model, self._update.optimizer, part)

    def _gathered(self, own: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """The state of all parameters at rank 0, from the ranks that have it."""
        facts = {name: {key: _fact(value) for key, value in values.items()} for name, values in own.items()}
        found: dict[str, dict[str, Any]] = {}
        for rank, theirs in enumerate(self.gather_values(facts)):
            for name, values in theirs.items():
                found[name] = {}
                for key, fact in values.items():
                    mine = own[name][key] if rank == self.rank else None
                    if "shape" in fact:
                        dtype = getattr(torch, fact["dtype"])
                        found[name][key] = fetch_to_rank_0(self.group, rank, mine, dtype, fact["shape"])
                    else:
                        found[name][key] = fact["value"]
        return {name: found[name] for members in self._members for name in members if name in found}


class _DividedUpdate(Update):
    """Looks at all gradients, which are the same everywhere; steps with this rank's; shares the weights."""

    def __init__(self, optimizer: Optimizer, settings: StepSettings, scaler: GradScaler | None, strategy: DDP) -> None:
        all_parameters = [p for group in optimizer.param_groups for p in group["params"]]

        def keep_own(groups: list[dict[str, Any]]) -> Optimizer:
            for group, part in zip(optimizer.param_groups, groups):
                group["params"] = part["params"]
            own = {id(p) for group in groups for p in group["params"]}
            for p in [p for p in optimizer.state if id(p) not in own]:
                del optimizer.state[p]
            return optimizer

        try:
            self._zero = ZeroRedundancyOptimizer(
                [dict(group) for group in optimizer.param_groups],
                keep_own,  # type: ignore[arg-type]  # in place of a class: what makes the optimizer of a rank's part
                parameters_as_bucket_view=True,  # one message from each rank, not one a parameter
            )
        except ValueError as error:  # parameters of several types, or sparse ones
            raise ModelError(f"torch's ZeroRedundancyOptimizer refuses the model: {error}; use strategy=ddp") from error
        super().__init__(optimizer, settings, scaler, SameGradients(all_parameters, strategy))

    def _step(self, gradients: list[Tensor]) -> None:
        # Its own groups are copies, which it writes over those of the optimizer in every step.
        for own, copied in zip(self.optimizer.param_groups, self._zero.param_groups):
            copied.update((key, value) for key, value in own.items() if key != "params")
        self._zero.step()


def _fact(value: Any) -> dict[str, Any]:
    if isinstance(value, Tensor):
        return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    return {"value": value}
