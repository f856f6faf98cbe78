"""State that every strategy can write and read: full tensors, keyed by the names of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distributed_training.runtime.errors import CheckpointError


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name. Tied parameters are listed under each name and share their memory."""
    left_out = weights_elsewhere(model)
    own = model.state_dict().items()
    return {name: value for name, value in own if isinstance(value, Tensor) and name not in left_out}


def weights_elsewhere(model: nn.Module) -> frozenset[str]:
    """Names of frozen weights that the model is made with again, from where they came: no part of its state.

    A model says so itself by an attribute of this name, as one with adapters on a checkpoint of the Hub does.
    """
    names: frozenset[str] = getattr(model, "weights_elsewhere", frozenset())
    return names


def load_model_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load weights, or say which tensors do not fit."""
    check_model_state(model, model_state(model), state)
    model.load_state_dict(state, strict=not weights_elsewhere(model))


def check_model_state(model: nn.Module, own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Refuse weights of other names or shapes than the model's own."""
    missing, unexpected = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    shapes = [
        f"{n} is {tuple(state[n].shape)} there and {tuple(own[n].shape)} here"
        for n in own
        if n in state and own[n].shape != state[n].shape
    ]
    problems = (
        [f"missing {missing[:3]}"] * bool(missing) + [f"unknown {unexpected[:3]}"] * bool(unexpected) + shapes[:3]
    )
    if problems:
        raise CheckpointError(f"the weights do not fit this {type(model).__name__}: {'; '.join(problems)}")


def optimizer_state(model: nn.Module, optimizer: Optimizer, names: Sequence[str] | None = None) -> dict[str, Any]:
    """An optimizer's state with names of parameters in place of torch's running numbers.

    `names` are those of its parameters in their order, where these are not the model's own.
    """
    names = names if names is not None else parameter_names(model, optimizer)
    raw = optimizer.state_dict()
    return {
        "kind": type(optimizer).__name__,
        "state": {names[number]: dict(values) for number, values in raw["state"].items()},
        "groups": [
            {
                **{k: v for k, v in group.items() if k not in _RUNTIME_KEYS},
                "params": [names[n] for n in group["params"]],
            }
            for group in raw["param_groups"]
        ],
    }


def load_optimizer_state(
    model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any], names: Sequence[str] | None = None
) -> None:
    """Load an optimizer's state by names. How the optimizer runs here (fused, foreach) is kept."""
    names = names if names is not None else parameter_names(model, optimizer)
    numbers = {name: number for number, name in enumerate(names)}
    own = [group["params"] for group in optimizer.state_dict()["param_groups"]]
    check_optimizer_state(optimizer, [[names[n] for n in members] for members in own], state)
    groups = [
        {
            **{k: v for k, v in mine.items() if k in _RUNTIME_KEYS},
            **saved,
            "params": members,  # in the order here: torch pairs them with its own by position
        }
        for saved, mine, members in zip(state["groups"], optimizer.param_groups, own)
    ]
    optimizer.load_state_dict(
        {"state": {numbers[n]: dict(v) for n, v in state["state"].items()}, "param_groups": groups}
    )
    lay_out_state(optimizer)


def lay_out_state(optimizer: Optimizer) -> None:
    """Have state that is shaped like its parameter lie in memory as the parameter does.

    Files hold tensors in the order of their shape, but weights may have their channels innermost. Fused kernels go
    through weights and state side by side as they lie: on a GPU they refuse to where the orders differ, on a CPU they
    take each other's numbers.
    """
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            alike = isinstance(value, Tensor) and value.shape == parameter.shape
            if alike and value.stride() != parameter.stride():
                values[name] = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def check_optimizer_state(optimizer: Optimizer, own: list[list[str]], state: Mapping[str, Any]) -> None:
    """Refuse the state of another optimizer, or of one over other parameters; `own` are their names by group."""
    if state["kind"] != type(optimizer).__name__:
        raise CheckpointError(
            f"the checkpoint holds the state of {state['kind']}, but the optimizer here is {type(optimizer).__name__}"
        )
    unknown = sorted(state["state"].keys() - {name for members in own for name in members})
    if unknown or len(state["groups"]) != len(own):
        raise CheckpointError(
            f"the optimizer state does not fit: {len(state['groups'])} groups there and {len(own)} "
            f"here, unknown parameters {unknown[:3]}"
        )
    for place, (saved, members) in enumerate(zip(state["groups"], own)):
        differing = sorted(set(saved["params"]) ^ set(members))
        if differing:
            raise CheckpointError(f"the optimizer state does not fit: group {place} differs in {differing[:3]}")


# How a step is computed here, as opposed to what it computes: not part of the training's state.
_RUNTIME_KEYS = ("fused", "foreach", "capturable", "differentiable")


def parameter_names(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """torch numbers an optimizer's parameters by their order over all groups; the model knows their names."""
    by_identity = {id(p): name for name, p in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [by_identity.get(id(p), f"parameter_{number}") for number, p in enumerate(parameters)]
