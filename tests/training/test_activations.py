"""Recomputing activations changes memory and time, never the training."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from distributed_training.config import ModelConfig
from distributed_training.models import build_model
from distributed_training.runtime.errors import ModelError
from distributed_training.training.activations import enable_gradient_checkpointing


class Blocks(nn.Module):
    """A user's model with repeated blocks in a list."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(dropout)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Nested(nn.Module):
    """Blocks further down."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Blocks()
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "sequential": lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)),
    "module list": Blocks,
    "dropout": lambda: Blocks(dropout=0.5),
    "nested": Nested,
    "batch norm": lambda: nn.Sequential(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)), nn.Linear(5, 2)),
    "own switch": lambda: build_model(ModelConfig(name="mlp", args={"dropout": 0.3}), num_classes=2, input_shape=(4,)),
}


def gradients(net: nn.Module) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(5)
    x = torch.randn(7, 4, requires_grad=True)
    out = net(x)
    out.square().mean().backward()
    return out.detach(), [p.grad.clone() for p in net.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", MODELS)
def test_outputs_gradients_and_statistics_are_the_same(name: str) -> None:
    plain = MODELS[name]()
    saving = copy.deepcopy(plain)
    enable_gradient_checkpointing(saving)
    (out, grads), (out_saving, grads_saving) = gradients(plain), gradients(saving)
    assert torch.equal(out, out_saving)
    assert len(grads) == len(grads_saving) > 0
    assert all(torch.equal(a, b) for a, b in zip(grads, grads_saving))
    for (key, a), b in zip(plain.state_dict().items(), saving.state_dict().values()):
        assert torch.equal(a, b), key


@pytest.mark.parametrize("name", ["sequential", "module list", "nested"])
def test_fewer_tensors_are_kept_for_the_backward_pass(name: str) -> None:
    def kept(net: nn.Module) -> int:
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.numel()), t)[1], lambda t: t):
            net(torch.randn(64, 4))
        return sum(sizes)

    plain, saving = MODELS[name](), MODELS[name]()
    enable_gradient_checkpointing(saving)
    assert kept(saving) < kept(plain)


def test_evaluation_is_left_alone() -> None:
    net = Blocks(dropout=0.5)
    x = torch.randn(3, 4)
    expected = net.eval()(x)
    enable_gradient_checkpointing(net)
    with torch.no_grad():
        assert torch.equal(net.eval()(x), expected)


def test_twice_is_once() -> None:
    net = Blocks()
    enable_gradient_checkpointing(net)
    forwards = [layer.forward for layer in net.layers]
    enable_gradient_checkpointing(net)
    assert [layer.forward for layer in net.layers] == forwards


def test_the_models_own_switch_is_used() -> None:
    class Own(nn.Module):
        on = 0

        def gradient_checkpointing_enable(self) -> None:
            self.on += 1

    net = Own()
    enable_gradient_checkpointing(net)
    assert net.on == 1


@pytest.mark.parametrize("net", [nn.Linear(2, 2), nn.Sequential(nn.ReLU())])
def test_a_model_without_blocks_is_refused_with_advice(net: nn.Module) -> None:
    with pytest.raises(ModelError, match=r"has no gradient_checkpointing_enable\(\) and no nn\.Sequential"):
        enable_gradient_checkpointing(net)
