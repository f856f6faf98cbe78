"""State by names of parameters: groups, tied weights, buffers, parameters that the model does not know."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn

from distributed_training.checkpoint.tree import put_together, take_apart
from distributed_training.runtime.errors import CheckpointError
from distributed_training.strategies.portable import (
    load_model_state,
    load_optimizer_state,
    model_state,
    optimizer_state,
)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(x)))


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer after a step, so that it has a state."""
    for number, p in enumerate(q for group in optimizer.param_groups for q in group["params"]):
        p.grad = torch.full_like(p, number + 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def two_groups(model: nn.Module, flip: bool = False) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    if flip:  # the same groups with their parameters in another order
        matrices, vectors = matrices[::-1], vectors[::-1]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.5}], lr=0.01)


def test_buffers_are_part_of_the_weights() -> None:
    model = Tied()
    assert "norm.running_mean" in model_state(model)
    other = Tied()
    other.norm.running_mean.fill_(7)
    load_model_state(model, model_state(other))
    assert torch.equal(model.norm.running_mean, torch.full((3,), 7.0))


def test_tied_weights_are_listed_under_each_name_and_stored_once() -> None:
    model = Tied()
    state = model_state(model)
    assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()
    description, tensors = take_apart(state)
    assert sum(t.shape == (5, 3) for t in tensors.values()) == 1
    other = Tied()
    load_model_state(other, put_together(json.loads(json.dumps(description)), tensors))
    assert other.head.weight is other.embedding.weight
    assert torch.equal(other.head.weight, model.head.weight)


def test_two_groups_keep_their_settings_and_names() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    state = optimizer_state(model, stepped(model, two_groups(model)))
    assert [group["params"] for group in state["groups"]] == [["0.weight", "1.weight"], ["0.bias", "1.bias"]]
    assert [(group["lr"], group["weight_decay"]) for group in state["groups"]] == [(0.01, 0.1), (0.5, 0.01)]
    assert set(state["state"]) == {"0.weight", "1.weight", "0.bias", "1.bias"}


def test_state_finds_its_parameters_by_name_not_by_number() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    saved = optimizer_state(model, stepped(model, two_groups(model)))
    other = copy.deepcopy(model)
    optimizer = two_groups(other, flip=True)
    load_optimizer_state(other, optimizer, copy.deepcopy(saved))
    again = optimizer_state(other, optimizer)
    for name, values in saved["state"].items():
        assert torch.equal(again["state"][name]["exp_avg"], values["exp_avg"]), name


def test_parameters_outside_the_model_are_numbered() -> None:
    model, temperature = nn.Linear(2, 1), nn.Parameter(torch.ones(1))
    optimizer = stepped(model, torch.optim.AdamW([*model.parameters(), temperature]))
    state = optimizer_state(model, optimizer)
    assert set(state["state"]) == {"weight", "bias", "parameter_2"}
    fresh = torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.ones(1))])
    load_optimizer_state(model, fresh, copy.deepcopy(state))
    assert float(optimizer_state(model, fresh)["state"]["parameter_2"]["step"]) == 1


def test_how_an_optimizer_runs_is_not_part_of_its_state() -> None:
    model = nn.Linear(2, 1)
    saved = optimizer_state(model, stepped(model, torch.optim.AdamW(model.parameters(), fused=True)))
    assert not {"fused", "foreach"} & saved["groups"][0].keys()
    plain = torch.optim.AdamW(model.parameters(), foreach=True)
    load_optimizer_state(model, plain, copy.deepcopy(saved))
    assert plain.param_groups[0]["foreach"] is True
    assert not plain.param_groups[0]["fused"]
    stepped(model, plain)


def test_another_number_of_groups_is_refused() -> None:
    model = nn.Linear(2, 1)
    saved = optimizer_state(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(CheckpointError, match="1 groups there and 2 here"):
        load_optimizer_state(model, two_groups(model), saved)


def test_unknown_parameters_are_refused_by_name() -> None:
    model = nn.Linear(2, 1)
    saved = optimizer_state(model, stepped(model, torch.optim.AdamW(model.parameters())))
    saved["state"]["gone"] = saved["state"].pop("bias")
    with pytest.raises(CheckpointError, match=r"unknown parameters .*gone"):
        load_optimizer_state(model, torch.optim.AdamW(model.parameters()), saved)


def test_groups_with_other_parameters_are_refused() -> None:
    """Before any step there is no state per parameter, but the groups still name them."""
    model = nn.Linear(2, 1)
    saved = optimizer_state(model, torch.optim.AdamW(model.parameters()))
    saved["groups"][0]["params"] = ["weight", "gone"]
    with pytest.raises(CheckpointError, match="gone"):
        load_optimizer_state(model, torch.optim.AdamW(model.parameters()), saved)


def test_groups_of_other_sizes_are_refused() -> None:
    model = nn.Linear(2, 1)
    saved = optimizer_state(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(CheckpointError):
        load_optimizer_state(model, torch.optim.AdamW([model.weight]), saved)
