"""One process, one device: the reference passes the contract, in every precision a CPU has."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.contract.strategy import (
    OPTIMIZERS,
    Factory,
    StrategyContract,
    assert_weights,
    batch,
    make_model,
    reference,
    same,
    train_step,
    was_skipped,
)
from torch import nn

from distributed_training.config import StrategyConfig
from distributed_training.runtime.errors import ConfigError
from distributed_training.runtime.world import World
from distributed_training.strategies import Place, StepSettings, Strategy, make_strategy
from distributed_training.strategies.single import SingleDevice

CPU = torch.device("cpu")


class TestSingleDevice(StrategyContract):
    @pytest.fixture
    def strategy_factory(self) -> Factory:
        return lambda: SingleDevice(Place(CPU))


def set_up(optimizer: str = "sgd", **settings: object) -> tuple[Strategy, nn.Module]:
    strategy, model = SingleDevice(Place(CPU)), make_model()
    return strategy, strategy.setup(model, OPTIMIZERS[optimizer](model), StepSettings(**settings))  # type: ignore[arg-type]


def test_a_step_without_an_optimizer_is_a_mistake_of_ours() -> None:
    strategy = SingleDevice(Place(CPU))
    strategy.setup(make_model(), None, StepSettings())
    with pytest.raises(AssertionError, match="without an optimizer"):
        strategy.step(torch.zeros(()))


def test_it_can_be_set_up_again_with_another_model() -> None:
    strategy, _ = set_up()
    model = make_model()
    forward = strategy.setup(model, OPTIMIZERS["adamw"](model), StepSettings())
    train_step(strategy, forward, batch(0))
    assert_weights(strategy, reference("adamw", 1)[0])


def test_bf16_computes_in_bf16_and_updates_in_fp32() -> None:
    strategy, forward = set_up(precision="bf16")
    with strategy.autocast():
        assert forward(batch(0)[0]).dtype == torch.bfloat16
    train_step(strategy, forward, batch(0))
    assert all(value.dtype == torch.float32 for value in strategy.state()["model"].values())
    assert_weights(strategy, reference("sgd", 1)[0], tolerance=2e-2)
    assert "scaler" not in strategy.state()


@pytest.mark.parametrize("clip", [None, 0.5])
def test_fp16_scales_the_loss_and_its_scale_is_part_of_the_state(clip: float | None) -> None:
    strategy, forward = set_up(precision="fp16", gradient_clip=clip)
    result = train_step(strategy, forward, batch(0))
    assert not was_skipped(result)
    assert (result.norm is None) == (clip is None)
    assert_weights(strategy, reference("sgd", 1, clip=clip)[0], tolerance=1e-2)
    before = copy.deepcopy(strategy.state())
    assert before["scaler"]["scale"] == 2.0**16
    assert was_skipped(train_step(strategy, forward, batch(1), factor=float("inf")))
    after = strategy.state()
    assert same(after["model"], before["model"])
    assert same(after["optimizer"], before["optimizer"])
    assert after["scaler"]["scale"] == 2.0**15
    fresh, _ = set_up(precision="fp16")
    fresh.load_state(after)
    assert same(fresh.state()["scaler"], after["scaler"])


def test_a_state_with_a_scaler_goes_where_there_is_none_and_back() -> None:
    half, _ = set_up(precision="fp16")
    full, _ = set_up(precision="fp32")
    full.load_state(half.state())
    half.load_state(full.state())


def named(name: str) -> Place:
    return Place(CPU, config=StrategyConfig(name=name))


def test_make_strategy_knows_single_and_auto() -> None:
    assert isinstance(make_strategy(named("auto")), SingleDevice)
    assert isinstance(make_strategy(named("single")), SingleDevice)


def test_make_strategy_refuses_an_unknown_name_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'singel' is unknown; known: .*single.*did you mean single"):
        make_strategy(named("singel"))


def test_single_among_several_processes_is_refused() -> None:
    with pytest.raises(ConfigError, match="one process, but torchrun started 2"):
        make_strategy(Place(CPU, World(0, 2, launcher="torchrun"), StrategyConfig(name="single")))
