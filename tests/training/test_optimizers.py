"""Optimizers as the config describes them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distributed_training.config import TrainingConfig
from distributed_training.runtime.errors import ModelError
from distributed_training.training.optimizers import apply_changes, build_optimizer


@pytest.mark.parametrize(
    ("name", "kind"), [("adamw", torch.optim.AdamW), ("adam", torch.optim.Adam), ("sgd", torch.optim.SGD)]
)
def test_each_name_is_an_optimizer(name: str, kind: type) -> None:
    built = build_optimizer(nn.Linear(2, 2), TrainingConfig(optimizer=name, lr=0.3))  # type: ignore[arg-type]
    assert type(built) is kind
    assert all(group["lr"] == 0.3 for group in built.param_groups)


def test_sgd_has_the_momentum() -> None:
    built = build_optimizer(nn.Linear(2, 2), TrainingConfig(optimizer="sgd", momentum=0.7))
    assert built.param_groups[0]["momentum"] == 0.7


def test_biases_and_norms_do_not_decay() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    decayed, free = build_optimizer(net, TrainingConfig(weight_decay=0.2)).param_groups
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.2, 0.0)
    assert [p.ndim for p in decayed["params"]] == [2]
    assert [p.ndim for p in free["params"]] == [1, 1, 1]


def test_frozen_parameters_are_left_out_and_empty_groups_too() -> None:
    net = nn.Linear(2, 3)
    net.weight.requires_grad_(False)
    (only,) = build_optimizer(net, TrainingConfig()).param_groups
    assert only["params"] == [net.bias]


def test_nothing_to_train_is_an_error() -> None:
    with pytest.raises(ModelError, match="Identity has no parameter to train"):
        build_optimizer(nn.Identity(), TrainingConfig())


def test_settings_that_were_changed_since_a_state_was_saved_take_the_place_of_its_own() -> None:
    net, then = nn.Linear(2, 3), TrainingConfig(optimizer="sgd", momentum=0.5, weight_decay=0.0)
    built = build_optimizer(net, then)
    apply_changes(built, vars(then), TrainingConfig(optimizer="sgd", momentum=0.9, weight_decay=0.2))
    assert [group["weight_decay"] for group in built.param_groups] == [0.2, 0.0]
    assert [group["momentum"] for group in built.param_groups] == [0.9, 0.9]


def test_an_optimizer_with_settings_of_its_own_keeps_them() -> None:
    net, then = nn.Linear(2, 3), TrainingConfig(weight_decay=0.1)
    own = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.3, weight_decay=0.7)
    apply_changes(own, vars(then), TrainingConfig(weight_decay=0.2, momentum=0.4))
    assert (own.param_groups[0]["weight_decay"], own.param_groups[0]["momentum"]) == (0.7, 0.3)
