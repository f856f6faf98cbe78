"""The one optimizer of a stepwise training: made once, or anew for every step and recognised by what it optimises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from distributed_training.runtime.errors import ConfigError

# Its rate is taken from every new one; how a step is computed (fused, foreach) is ours to choose.
_NOT_COMPARED = ("lr", "fused", "foreach", "capturable", "differentiable")
_ADVICE = "pass the same optimizer in every step, or make a trainer for each"


class KeptOptimizer:
    """The optimizer of the first step, which has the state. Those of later steps lend it their learning rates."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self._names = {id(p): name for name, p in model.named_parameters()}
        self.optimizer = _checked(optimizer, self._names, model)
        self._members, self._settings = self._describe(optimizer)
        if optimizer.state:  # it may have come about on another device
            optimizer.load_state_dict(optimizer.state_dict())

    def recognise(self, other: Any) -> None:
        """Take an optimizer for the one that is kept, with its own learning rate; or refuse it, and say why."""
        if other is self.optimizer:
            return
        kept = type(self.optimizer).__name__
        if type(other) is not type(self.optimizer):
            raise ConfigError(f"this trainer trains with {kept}, but was given a {type(other).__name__}; {_ADVICE}")
        members, settings = self._describe(other)
        if members != self._members:
            raise ConfigError(f"this trainer's {kept} {_difference(self._members, members)}; {_ADVICE}")
        for before, now in zip(self._settings, settings):
            changed = [f"{key} was {before[key]} and is {now[key]}" for key in before if before[key] != now[key]]
            if changed:
                raise ConfigError(
                    f"{kept} was made anew with other settings: {', '.join(changed)}. Only the learning rate may "
                    "change so; for anything else keep one optimizer and change its param_groups"
                )
        if other.state:
            raise ConfigError(
                f"this {kept} has a state of its own, but the trainer keeps that of the first it was given; {_ADVICE}"
            )
        for own, new in zip(self.optimizer.param_groups, other.param_groups):
            own["lr"] = new["lr"]

    @contextmanager
    def scaled(self, factor: float) -> Iterator[None]:
        """Learning rates times a factor for an update. The user, their schedulers and checkpoints never see it."""
        if factor == 1.0:
            yield
            return
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group, rate in zip(self.optimizer.param_groups, rates):
            group["lr"] = rate * factor
        try:
            yield
        finally:
            for group, rate in zip(self.optimizer.param_groups, rates):
                group["lr"] = rate

    def with_own_settings(self, state: dict[str, Any]) -> dict[str, Any]:
        """A saved optimizer state with the settings that the optimizer has here: what the user passes counts."""
        groups = [
            {**saved, **{key: value for key, value in own.items() if key != "params"}}
            for saved, own in zip(state["groups"], self.optimizer.param_groups)
        ]
        return {**state, "groups": groups + list(state["groups"][len(groups) :])}

    def _describe(self, optimizer: Optimizer) -> tuple[list[list[str]], list[dict[str, str]]]:
        """(names of parameters, settings) of each group."""
        keys = [key for key in optimizer.defaults if key not in _NOT_COMPARED]
        members = [[self._names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
        return members, [{key: repr(group.get(key)) for key in keys} for group in optimizer.param_groups]


def _checked(optimizer: Any, names: dict[int, str], model: nn.Module) -> Optimizer:
    """Refuse what does not optimise the model, the whole of it and nothing else."""
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"optimizer is a {type(optimizer).__name__}; give a torch optimizer over model.parameters()")
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    foreign = len(held - names.keys())
    if foreign:
        raise ConfigError(
            f"{foreign} of the {len(held)} parameters of this {type(optimizer).__name__} are not those of the model "
            f"({type(model).__name__}) that the trainer was made for; make it from model.parameters()"
        )
    left_out = [names[id(p)] for p in model.parameters() if p.requires_grad and id(p) not in held]
    if left_out:
        raise ConfigError(
            f"this {type(optimizer).__name__} leaves out {len(left_out)} parameters that are trained "
            f"({', '.join(left_out[:3])}); make it from model.parameters(), or set requires_grad=False on the rest"
        )
    return optimizer


def _difference(before: list[list[str]], now: list[list[str]]) -> str:
    old, new = {name for group in before for name in group}, {name for group in now for name in group}
    if "" in new:
        return "is over the model's parameters, but the new one holds others"
    missing, more = sorted(old - new), sorted(new - old)
    if missing or more:
        what = f"lacks {', '.join(missing[:3])}" if missing else f"has {', '.join(more[:3])} too"
        return f"is over {len(old)} parameters, but the new one {what}"
    return f"has {len(before)} groups of parameters, but the new one has {len(now)}, or in another order"
