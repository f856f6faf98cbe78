"""What DeepSpeed adds to the contract, run by every rank of a job: see test_deepspeed.py for who starts it."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.contract.strategy import BATCH, OPTIMIZERS, assert_weights, batch, make_model, reference, same, train_step
from torch import nn

from distributed_training.config import StrategyConfig
from distributed_training.runtime.errors import ConfigError, ModelError
from distributed_training.runtime.world import read_world
from distributed_training.strategies import Place, StepSettings, Strategy, make_strategy
from distributed_training.strategies.single import SingleDevice
from distributed_training.training.agreement import from_rank_0

CPU = torch.device("cpu")
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
Build = Callable[..., tuple[Strategy, nn.Module]]


@pytest.fixture
def build() -> Iterator[Build]:
    """Make a strategy with a model; all are torn down at the end."""
    made: list[Strategy] = []

    def make(
        stage: int | None = None,
        optimizer: str = "adamw",
        model: nn.Module | None = None,
        file: str | None = None,
        batch_size: int = BATCH,
        **settings: Any,
    ) -> tuple[Strategy, nn.Module]:
        config = StrategyConfig(name="deepspeed", zero_stage=stage, deepspeed_config=file)  # type: ignore[arg-type]
        made.append(make_strategy(Place(CPU, read_world(), config, deadline=30, batch_size=batch_size)))
        model = model if model is not None else make_model()
        return made[-1], made[-1].setup(model, OPTIMIZERS[optimizer](model), StepSettings(**settings))

    yield make
    for strategy in reversed(made):
        strategy.teardown()


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Write a DeepSpeed JSON and give its path."""

    def to(**content: Any) -> str:
        path = tmp_path / "ds.json"
        path.write_text(json.dumps(content))
        return str(path)

    return to


def alone(steps: int, optimizer: str = "adamw", model: nn.Module | None = None, **settings: Any) -> Strategy:
    """`single` after some steps over the same batches."""
    strategy, model = SingleDevice(Place(CPU)), model if model is not None else make_model()
    forward = strategy.setup(model, OPTIMIZERS[optimizer](model), StepSettings(**settings))
    for step in range(steps):
        train_step(strategy, forward, batch(step))
    return strategy


def assert_close(strategy: Strategy, expected: Strategy, tolerance: float) -> None:
    weights, wanted = strategy.state().get("model", {}), expected.state()["model"]
    if strategy.rank == 0:
        assert {v.dtype for v in weights.values()} == {torch.float32}
        for name, value in wanted.items():
            torch.testing.assert_close(weights[name], value, rtol=tolerance, atol=tolerance, msg=name)


@STAGES
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision_is_that_of_one_device_over_fp32_weights(build: Build, stage: int, precision: str) -> None:
    settings: dict[str, Any] = {"precision": precision, "gradient_clip": 0.5}
    strategy, forward = build(stage, "sgd", **settings)
    seen = []
    for step in range(4):
        with strategy.autocast(), torch.no_grad():
            seen.append(forward(torch.zeros(1, 5)).dtype)
        assert not train_step(strategy, forward, batch(step), parts=2).skipped
    assert set(seen) == {torch.bfloat16 if precision == "bf16" else torch.float16}
    expected = alone(4, "sgd", **settings)
    assert_close(strategy, expected, 5e-3)
    if precision == "fp16" and strategy.rank == 0:
        assert strategy.state()["scaler"] == expected.state()["scaler"]
    elif precision == "fp16":
        strategy.state()


@STAGES
def test_a_scale_that_overflows_is_lowered_and_saved(build: Build, stage: int) -> None:
    strategy, forward = build(stage, precision="fp16")
    train_step(strategy, forward, batch(0))
    before = copy.deepcopy(from_rank_0(strategy, strategy.state()))
    result = train_step(strategy, forward, batch(1), factor=1e4)  # too large for fp16 only when scaled
    after = copy.deepcopy(from_rank_0(strategy, strategy.state()))
    assert not result.skipped
    assert same(after["model"], before["model"])
    assert after["scaler"]["scale"] == before["scaler"]["scale"] / 2
    assert after["scaler"]["_growth_tracker"] == 0
    again, forward_again = build(stage, precision="fp16")
    again.load_state(copy.deepcopy(after))
    for one, other in ((strategy, forward), (again, forward_again)):
        train_step(one, other, batch(1))
    first, second = strategy.state(), again.state()
    assert same(first, second)
    assert strategy.rank != 0 or not same(first["model"], after["model"])


def test_deepspeeds_own_bf16_keeps_fp32_weights_beside_the_models(build: Build, write: Callable[..., str]) -> None:
    file = write(bf16={"enabled": "auto"}, zero_optimization={"stage": 2})
    strategy, forward = build(None, file=file, precision="bf16")
    assert next(forward.parameters()).dtype == torch.bfloat16
    for step in range(3):
        train_step(strategy, forward, batch(step))
    assert_close(strategy, alone(3, precision="bf16"), 3e-2)
    state = from_rank_0(strategy, copy.deepcopy(strategy.state()))
    assert not same(state["model"]["0.weight"], state["model"]["0.weight"].bfloat16().float()), "weights were rounded"
    again, forward_again = build(None, file=file, precision="bf16")
    again.load_state(copy.deepcopy(state))
    for one, other in ((strategy, forward), (again, forward_again)):
        train_step(one, other, batch(3))
    assert same(strategy.state(), again.state())


class Odd(nn.Module):
    """Frozen and tied parameters, one that no number of ranks divides, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 5, bias=False)
        self.norm = nn.BatchNorm1d(5)
        self.again = nn.Linear(5, 5)
        self.again.weight = self.first.weight
        self.frozen = nn.Linear(5, 7)
        self.frozen.requires_grad_(False)
        self.last = nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.frozen(self.again(self.first(x).tanh()))) * self.scale + self.norm(x).sum() * 0


@STAGES
def test_frozen_tied_and_uneven_parameters_and_buffers_are_saved_and_loaded(build: Build, stage: int) -> None:
    strategy, forward = build(stage, model=Odd())
    for step in range(3):
        train_step(strategy, forward, batch(step))
    state = from_rank_0(strategy, copy.deepcopy(strategy.state()))
    expected = alone(3, model=Odd()).state()
    assert list(state["model"]) == list(expected["model"])
    for name in ("first.weight", "again.weight", "frozen.weight", "last.bias", "scale"):
        torch.testing.assert_close(state["model"][name], expected["model"][name], rtol=1e-5, atol=1e-6)
    assert state["optimizer"]["groups"] == expected["optimizer"]["groups"]
    assert state["optimizer"]["state"].keys() - expected["optimizer"]["state"].keys() == set()
    again, forward_again = build(stage, model=Odd())
    again.load_state(copy.deepcopy(state))
    for one, other in ((strategy, forward), (again, forward_again)):
        train_step(one, other, batch(3))
    assert same(strategy.state(), again.state())


@STAGES
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_state_goes_into_every_other_stage(build: Build, stage: int, optimizer: str) -> None:
    strategy, forward = build(stage, optimizer)
    for step in range(2):
        train_step(strategy, forward, batch(step))
    state = from_rank_0(strategy, copy.deepcopy(strategy.state()))
    for other in range(4):
        second, forward_second = build(other, optimizer)
        second.load_state(copy.deepcopy(state))
        train_step(second, forward_second, batch(2))
        assert_weights(second, reference(optimizer, 3)[0])


@STAGES
def test_the_rate_that_a_schedule_sets_is_the_rate_of_the_step(build: Build, stage: int) -> None:
    model = make_model()
    config = StrategyConfig(name="deepspeed", zero_stage=stage)  # type: ignore[arg-type]
    strategy = make_strategy(Place(CPU, read_world(), config, deadline=30))
    optimizer = OPTIMIZERS["sgd"](model)
    forward = strategy.setup(model, optimizer, StepSettings())
    state = from_rank_0(strategy, copy.deepcopy(strategy.state()))
    strategy.load_state(state)  # which may put other groups in their place
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train_step(strategy, forward, batch(0))
    assert same(from_rank_0(strategy, strategy.state())["model"], state["model"])
    strategy.teardown()


@STAGES
def test_activations_can_be_recomputed(build: Build, stage: int) -> None:
    from distributed_training.training.activations import enable_gradient_checkpointing

    model = make_model()
    enable_gradient_checkpointing(model)
    strategy, forward = build(stage, "sgd", model=model)
    for step in range(3):
        forward.eval()
        with torch.no_grad():  # an evaluation in between
            forward(torch.zeros(2, 5))
        forward.train()
        train_step(strategy, forward, batch(step), parts=2)
    assert_weights(strategy, reference("sgd", 3)[0])


def test_what_only_the_file_says_counts(build: Build, write: Callable[..., str]) -> None:
    file = write(gradient_clipping=0.05, zero_optimization={"stage": 1, "contiguous_gradients": False})
    strategy, forward = build(None, "sgd", file=file)
    norms = [train_step(strategy, forward, batch(step)).norm for step in range(3)]
    model, expected = reference("sgd", 3, clip=0.05)
    assert [float(n) for n in norms if n is not None] == pytest.approx(expected, rel=1e-4)
    assert_weights(strategy, model)
    engine: Any = forward
    assert engine.zero_optimization_stage() == 1
    assert engine.zero_contiguous_gradients() is False


def test_what_deepspeed_refuses_is_an_error_that_names_the_file(build: Build, write: Callable[..., str]) -> None:
    file = write(zero_optimization={"stage": 1, "reduce_bucket_size": -5})
    with pytest.raises(ConfigError, match=r"(?s)DeepSpeed refuses.*ds\.json.*reduce_bucket_size"):
        build(None, file=file)


def test_a_parameter_without_dimensions_is_refused_by_name(build: Build) -> None:
    model = make_model()
    model.register_parameter("temperature", nn.Parameter(torch.tensor(1.0)))
    with pytest.raises(ModelError, match=r"temperature.*shape \(1,\)"):
        build(1, model=model)


def test_an_optimizer_that_deepspeed_would_replace_is_refused(build: Build) -> None:
    config = StrategyConfig(name="deepspeed", zero_stage=1)
    strategy = make_strategy(Place(CPU, read_world(), config, deadline=30))
    model = make_model()
    with pytest.raises(ConfigError, match="in the place of Adagrad"):
        strategy.setup(model, torch.optim.Adagrad(model.parameters()), StepSettings())
    strategy.teardown()


def test_it_says_nothing_that_a_user_could_not_use(build: Build, capfd: pytest.CaptureFixture[str]) -> None:
    strategy, forward = build(2, "sgd")
    train_step(strategy, forward, batch(0))
    train_step(strategy, forward, batch(1), factor=float("nan"))
    said = capfd.readouterr()
    assert said.out + said.err == ""
    assert "DS_ACCELERATOR" not in os.environ


def test_one_rank_alone_may_have_the_bad_sample(build: Build) -> None:
    strategy, forward = build(3, "sgd")
    before = copy.deepcopy(strategy.state())
    x, y = batch(0)
    x[-1] = float("inf")  # the last rank's
    assert train_step(strategy, forward, (x, y), parts=2).skipped
    assert same(strategy.state(), before)
    loss = F.cross_entropy(forward(batch(1)[0]), batch(1)[1])
    assert torch.isfinite(loss)
