"""Channels of convolutions innermost on a GPU, by default in bf16, whatever the strategy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from distributed_training.checkpoint.tree import put_together, take_apart
from distributed_training.config import StrategyConfig
from distributed_training.runtime.world import World
from distributed_training.strategies import Place, StepSettings, Strategy, make_strategy

CUDA = torch.device("cuda", 0)


def losses_of(strategy: Strategy, forward: nn.Module, steps: int) -> list[float]:
    """Of so many steps on the same images."""
    generator = torch.Generator(CUDA).manual_seed(1)
    images = torch.randn(64, 3, 16, 16, device=CUDA, generator=generator)
    labels = torch.randint(10, (64,), device=CUDA, generator=generator)
    losses = []
    for _ in range(steps):
        with strategy.micro_batch(last=True):
            with strategy.autocast():
                loss = nn.functional.cross_entropy(forward(images), labels)
            strategy.backward(loss)
        strategy.step(loss.detach())
        losses.append(float(loss.detach()))
    return losses


def resumed(name: str, steps: int, state: Any = None) -> tuple[list[float], Any]:
    """(losses, state) of so many steps in bf16 by AdamW, which has a fused kernel, from a state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 14 * 14, 10)).to(CUDA)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    strategy = make_strategy(Place(CUDA, World(), StrategyConfig(name=name), deadline=60))
    forward = strategy.setup(model, optimizer, StepSettings(precision="bf16", channels_last="on", fused=True))
    if state is not None:
        strategy.load_state(state)
    losses = losses_of(strategy, forward, steps)
    description, tensors = take_apart(strategy.state())
    in_a_file = {name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()}
    strategy.teardown()
    return losses, put_together(description, in_a_file)


@pytest.mark.parametrize("name", ["single", "ddp", "zero1", "zero2", "zero3", "accelerate"])
def test_a_resumed_training_goes_on_as_it_was(name: str) -> None:
    if name == "accelerate":
        pytest.importorskip("accelerate")
    whole, _ = resumed(name, 8)
    first, state = resumed(name, 4)
    second, _ = resumed(name, 4, state)
    assert first + second == pytest.approx(whole, rel=0.01)
    assert whole[-1] < 0.8 * whole[0]


def train(name: str, **settings: Any) -> tuple[list[float], list[bool]]:
    """(losses, whether the channels lie innermost in what each convolution gave) of a few steps under a strategy."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2))
    model = nn.Sequential(model, nn.Flatten(), nn.Linear(32 * 6 * 6, 10)).to(CUDA)
    innermost: list[bool] = []
    for convolution in (m for m in model.modules() if isinstance(m, nn.Conv2d)):
        convolution.register_forward_hook(
            lambda _m, _inputs, output: innermost.append(output.is_contiguous(memory_format=torch.channels_last))
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    strategy = make_strategy(Place(CUDA, World(), StrategyConfig(name=name), deadline=60))
    forward = strategy.setup(model, optimizer, StepSettings(precision="bf16", **settings))
    losses = losses_of(strategy, forward, 6)
    strategy.teardown()
    return losses, innermost


@pytest.mark.parametrize("name", ["single", "dp", "ddp", "zero1", "zero2", "zero3", "fsdp", "accelerate"])
def test_they_are_innermost_by_themselves(name: str) -> None:
    if name == "accelerate":
        pytest.importorskip("accelerate")
    losses, innermost = train(name, channels_last="auto")
    assert innermost == [True] * 12
    expected, others = train("single", channels_last="off")
    assert others == [False] * 12
    assert losses == pytest.approx(expected, rel=0.03)
    assert losses[-1] < 0.9 * losses[0]
