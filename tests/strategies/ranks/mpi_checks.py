"""What the MPI backend adds to the strategies, run by every rank under mpirun: see tests/strategies/test_mpi.py."""

from __future__ import annotations

import os
from typing import Any

os.environ["DTRAIN_MPI_RANKS_PER_HOST"] = "1"  # as if every rank were a machine: compression is for the wire

import pytest
import torch
import torch.distributed as dist
from tests.contract.strategy import CLASSES, FEATURES, batch, train_step, was_skipped
from torch import Tensor, nn

from distributed_training.config import StrategyConfig
from distributed_training.runtime.errors import ConfigError
from distributed_training.runtime.world import read_world
from distributed_training.strategies import Place, StepSettings, Strategy, make_strategy


def join(name: str, **options: Any) -> Strategy:
    return make_strategy(Place(torch.device("cpu"), read_world(), StrategyConfig(name=name, **options), 60))


def set_up(strategy: Strategy) -> nn.Module:
    """Give it a model that is large enough for PowerSGD to have something to do."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return strategy.setup(model, optimizer, StepSettings())


def weights_after(name: str, steps: int = 4, **options: Any) -> Tensor:
    """All weights after a few steps, as rank 0 has them; the same on all ranks to the bit where all have them."""
    strategy = join(name, **options)
    forward = set_up(strategy)
    for step in range(steps):
        train_step(strategy, forward, batch(step))
    assert dist.get_backend() == "dtrain_mpi"
    state = strategy.state()
    own = torch.cat([value.flatten() for value in state["model"].values()]) if state else torch.zeros(0)
    everyone = strategy.gather(own[None]) if strategy.gather_values(len(own))[-1] else own[None]
    assert all(torch.equal(one, own) for one in everyone)
    assert strategy.exact == (options.get("compression", "none") == "none")
    strategy.teardown()
    return own


@pytest.fixture(scope="module")
def exact() -> Tensor:
    return weights_after("mpi")


@pytest.mark.parametrize(("compression", "most"), [("bf16", 0.01), ("int8", 0.02), ("fp16", 0.01), ("powersgd", 0.5)])
def test_compressed_gradients_train_nearly_the_same_and_alike_on_all_ranks(
    compression: str, most: float, exact: Tensor
) -> None:
    found = weights_after("mpi", compression=compression, powersgd_start_step=2)
    assert 0 < float((found - exact).abs().max()) <= most


def test_the_guard_sees_a_bad_number_through_int8() -> None:
    strategy = join("mpi", compression="int8")
    forward = set_up(strategy)
    train_step(strategy, forward, batch(0))
    before = {name: value.clone() for name, value in strategy.state()["model"].items()}
    x, y = batch(1)
    x[-1, 0] = float("nan")  # on the last rank
    assert was_skipped(train_step(strategy, forward, (x, y)))
    assert all(torch.equal(value, before[name]) for name, value in strategy.state()["model"].items())
    strategy.teardown()


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "fsdp"])
def test_other_strategies_run_on_it(name: str, exact: Tensor) -> None:
    found = weights_after(name, backend="mpi")
    if len(found):
        torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-6)


def test_int8_is_refused_elsewhere() -> None:
    strategy = join("ddp", backend="gloo", compression="int8")
    with pytest.raises(ConfigError, match=r"compression=int8 is nothing that gloo can do.*strategy\.backend=mpi"):
        set_up(strategy)
    strategy.teardown()
