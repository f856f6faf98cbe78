"""The mlp: shapes, and that it is no more than it says."""

from __future__ import annotations

import pytest
import torch

from distributed_training.config import ModelConfig
from distributed_training.models import get_model
from distributed_training.runtime.errors import ModelError


def _shapes(model: torch.nn.Module) -> list[tuple[int, ...]]:
    return [tuple(p.shape) for p in model.parameters()]


def test_flattens_any_sample() -> None:
    model = get_model("mlp")(ModelConfig(num_classes=10), (1, 8, 8))
    assert _shapes(model) == [(256, 64), (256,), (256, 256), (256,), (10, 256), (10,)]
    assert model(torch.rand(3, 1, 8, 8)).shape == (3, 10)
    assert torch.equal(model(torch.ones(2, 1, 8, 8)), model(torch.ones(2, 64)))


def test_arguments() -> None:
    model = get_model("mlp")(ModelConfig(num_classes=2, args={"hidden": [8], "dropout": 0.5, "in_features": 4}))
    assert _shapes(model) == [(8, 4), (8,), (2, 8), (2,)]
    assert [m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)] == [0.5]


def test_no_hidden_layer_is_a_linear_model() -> None:
    model = get_model("mlp")(ModelConfig(num_classes=2, args={"hidden": []}), (4,))
    x = torch.rand(3, 4)
    assert torch.equal(model(x), x @ model.head.weight.T + model.head.bias)


def test_needs_to_know_its_input() -> None:
    with pytest.raises(ModelError, match=r"mlp needs model\.args\.in_features"):
        get_model("mlp")(ModelConfig(num_classes=2))


def test_learns() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    y = (x[:, 0] * x[:, 1] > 0).long()
    model = get_model("mlp")(ModelConfig(num_classes=2, args={"hidden": [32]}), (4,))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(100):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert (model(x).argmax(1) == y).float().mean() > 0.9
