"""zero1, zero2 and zero3 on a GPU: NCCL with one rank, mixed precision, offload, nothing that waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from distributed_training.config import StrategyConfig
from distributed_training.models.gpt import GPT, GPTArguments
from distributed_training.runtime.world import World
from distributed_training.strategies import Place, StepSettings, make_strategy, sharding

CUDA = torch.device("cuda", 0)


def place(name: str, **options: Any) -> Place:
    return Place(CUDA, World(), StrategyConfig(name=name, **options), deadline=60)


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[float]]:
    """Losses of a few steps of a small GPT under a strategy."""
    monkeypatch.setattr(sharding, "UNIT", 1000)

    def train(name: str, options: dict[str, Any] | None = None, *, busy: bool = False, **settings: Any) -> list[float]:
        torch.manual_seed(0)
        model = GPT(GPTArguments(vocab_size=64, context=32, layers=3, heads=2, width=32)).to(CUDA)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
        strategy = make_strategy(place(name, **(options or {})))
        forward = strategy.setup(model, optimizer, StepSettings(**settings))
        found = []
        for _ in range(8):
            ids = torch.randint(64, (8, 32), generator=torch.Generator().manual_seed(1)).to(CUDA)
            for part in range(2):
                with strategy.micro_batch(last=part == 1):
                    with strategy.autocast():
                        loss = forward(ids, labels=ids)["loss"] / 2
                    strategy.backward(loss)
            if busy:
                torch.cuda._sleep(20_000_000)  # cycles: what is copied from the GPU now comes late
            assert not bool(strategy.step(loss.detach()).skipped)
            found.append(float(loss.detach()))
        strategy.teardown()
        return found

    return train


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_precisions_train_like_a_single_gpu(losses: Any, name: str, precision: str) -> None:
    found = losses(name, precision=precision, gradient_clip=1.0)
    expected = losses("single", precision=precision, gradient_clip=1.0)
    assert found == pytest.approx(expected, rel=1e-4 if precision == "fp32" else 0.02)
    assert found[-1] < 0.9 * found[0]


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_offloaded_to_the_cpu(losses: Any, precision: str, busy: bool) -> None:
    found = losses("zero3", {"cpu_offload": True}, busy=busy, precision=precision, gradient_clip=1.0)
    assert found == pytest.approx(losses("single", precision=precision, gradient_clip=1.0), rel=0.02)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_step_does_not_wait_for_the_gpu() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).to(CUDA)
    strategy = make_strategy(place("zero3"))
    forward = strategy.setup(model, torch.optim.AdamW(model.parameters()), StepSettings(gradient_clip=1.0))
    inputs = torch.randn(8, 64, device=CUDA)
    for step in range(4):
        if step == 2:
            torch.cuda.set_sync_debug_mode("error")
        try:
            loss = forward(inputs).square().mean()
            strategy.backward(loss)
            strategy.step(loss.detach())
        finally:
            torch.cuda.set_sync_debug_mode("default")
    strategy.teardown()
