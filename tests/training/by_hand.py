"""What a stepwise training is compared with: a plain torch loop over whole batches, in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

FEATURES, CLASSES = 5, 3
Data = tuple[Tensor, Tensor]


def network(seed: int = 3) -> nn.Module:
    """The same small network each time."""
    generator = torch.Generator().manual_seed(seed)
    net = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    return net


def batches(sizes: Iterable[int], first: int = 0) -> list[Data]:
    """Batches of these sizes, each a function of its number."""
    made = []
    for number, size in enumerate(sizes, first):
        generator = torch.Generator().manual_seed(number)
        inputs = torch.randn(size, FEATURES, generator=generator)
        made.append((inputs, torch.randint(CLASSES, (size,), generator=generator)))
    return made


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), lr=0.01)


def plain_loop(
    net: nn.Module,
    data: Iterable[Any],
    criterion: Callable[..., Tensor],
    optimizer: torch.optim.Optimizer | None = None,
    accumulate: int = 1,
) -> list[float]:
    """The losses of a loop as everybody writes it, with one optimizer."""
    optimizer = optimizer or adam(net)
    losses = []
    for number, (inputs, targets) in enumerate(data, 1):
        loss = criterion(net(inputs), targets)
        (loss / accumulate).backward()
        losses.append(loss.item())
        if number % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def assert_same(net: nn.Module, expected: nn.Module, tolerance: float = 1e-6) -> None:
    for (name, value), other in zip(net.state_dict().items(), expected.state_dict().values()):
        torch.testing.assert_close(value.cpu(), other.cpu(), rtol=tolerance, atol=tolerance, msg=name)


def close(losses: list[float]) -> Any:
    return pytest.approx(losses, rel=1e-5, abs=1e-6)
