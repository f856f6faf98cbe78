"""What every strategy has to pass: it trains like plain torch on one device, whatever it does to get there.

A strategy's own test inherits `StrategyContract` and gives a fixture `strategy_factory`. Nothing here assumes one
process: each rank computes its own share of the batch, and weights are compared in the portable form. A test of many
processes runs the same class in each of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distributed_training.runtime.errors import CheckpointError
from distributed_training.strategies import Place, StepResult, StepSettings, Strategy
from distributed_training.strategies.single import SingleDevice
from distributed_training.training.agreement import from_rank_0

Factory = Callable[[], Strategy]
TOLERANCE = 1e-6
FEATURES, CLASSES, BATCH = 5, 3, 13  # a batch that no number of ranks or parts divides

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
}


def make_model() -> nn.Module:
    """The same small network each time."""
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    return model


def make_convolution() -> nn.Sequential:
    """The same small network with a convolution each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        image = nn.Linear(FEATURES, 3 * 4 * 4), nn.Unflatten(1, (3, 4, 4))
        return nn.Sequential(*image, nn.Conv2d(3, 6, 3), nn.Flatten(), nn.Linear(6 * 2 * 2, CLASSES))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The global batch of a step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, FEATURES, generator=generator), torch.randint(CLASSES, (BATCH,), generator=generator)


def share(strategy: Strategy, data: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """This rank's rows, on its device."""
    rows = slice(BATCH * strategy.rank // strategy.world_size, BATCH * (strategy.rank + 1) // strategy.world_size)
    return data[0][rows].to(strategy.device), data[1][rows].to(strategy.device)


def train_step(
    strategy: Strategy, forward: nn.Module, data: tuple[Tensor, Tensor], parts: int = 1, factor: float = 1.0
) -> StepResult:
    """One step over the global batch, cut into `parts` micro-batches on each rank."""
    x, y = share(strategy, data)
    bounds = [len(x) * k // parts for k in range(parts + 1)]
    total = torch.zeros((), device=strategy.device)
    for k in range(parts):
        with strategy.micro_batch(last=k == parts - 1):
            rows = slice(bounds[k], bounds[k + 1])
            with strategy.autocast():
                loss = F.cross_entropy(forward(x[rows]), y[rows], reduction="sum") / BATCH * factor
            strategy.backward(loss)
        total += loss.detach()
    return strategy.step(total)


def reference(
    optimizer: str, steps: int, *, clip: float | None = None, first: int = 0, start: nn.Module | None = None
) -> tuple[nn.Module, list[float]]:
    """(model, norms): what a loop written by hand comes to."""
    model = start or make_model()
    optim = OPTIMIZERS[optimizer](model)
    norms = []
    for step in range(first, first + steps):
        x, y = batch(step)
        optim.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if clip is not None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optim.step()
    return model, norms


def assert_weights(strategy: Strategy, expected: nn.Module, tolerance: float = TOLERANCE) -> None:
    weights = strategy.state().get("model", {})
    if strategy.rank != 0:  # it has its part in gathering them; only rank 0 must have the whole
        return
    assert weights.keys() == expected.state_dict().keys()
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(weights[name].cpu(), value, rtol=tolerance, atol=tolerance, msg=name)


def is_innermost(tensor: Tensor) -> bool:
    """Whether the channels lie innermost."""
    return tensor.is_contiguous(memory_format=torch.channels_last)


def was_skipped(result: StepResult) -> bool:
    return bool(result.skipped)


def same(one: Any, other: Any) -> bool:
    """Equality of nested states, to the last bit."""
    if isinstance(one, Tensor):
        return torch.equal(one.cpu(), other.cpu())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other))
    return bool(one == other)


class StrategyContract:
    """Inherit as `class TestX(StrategyContract)` and give a fixture `strategy_factory`."""

    @pytest.fixture
    def strategy_factory(self) -> Factory:
        """A function that makes a new strategy."""
        raise NotImplementedError

    @pytest.fixture
    def build(self, strategy_factory: Factory) -> Iterator[Callable[..., tuple[Strategy, nn.Module]]]:
        """Make a strategy that is set up with a fresh model; all are torn down at the end."""
        made: list[Strategy] = []

        def make(optimizer: str | None = "sgd", **settings: Any) -> tuple[Strategy, nn.Module]:
            strategy = strategy_factory()
            made.append(strategy)
            model = make_model().to(strategy.device)
            optim = OPTIMIZERS[optimizer](model) if optimizer else None
            return strategy, strategy.setup(model, optim, StepSettings(**settings))

        yield make
        for strategy in made:
            strategy.teardown()
            strategy.teardown()  # twice is once

    def test_knows_its_place(self, strategy_factory: Factory) -> None:
        strategy = strategy_factory()
        assert strategy.name
        assert 0 <= strategy.rank < strategy.world_size
        strategy.teardown()

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    @pytest.mark.parametrize("fused", [True, False])
    def test_steps_equal_a_loop_written_by_hand(self, build: Any, optimizer: str, fused: bool) -> None:
        strategy, forward = build(optimizer, fused=fused)
        for step in range(5):
            assert not was_skipped(train_step(strategy, forward, batch(step)))
        assert_weights(strategy, reference(optimizer, 5)[0])

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_channels_may_be_innermost(self, strategy_factory: Factory, optimizer: str) -> None:
        strategy, model = strategy_factory(), make_convolution()
        expected = reference(optimizer, 3, start=copy.deepcopy(model))[0]
        model.to(strategy.device)
        turned: list[bool] = []
        model[2].register_forward_hook(
            lambda convolution, inputs, _: turned.append(is_innermost(convolution.weight) or is_innermost(inputs[0]))
        )
        forward = strategy.setup(model, OPTIMIZERS[optimizer](model), StepSettings(channels_last="on"))
        for step in range(3):
            train_step(strategy, forward, batch(step))
        assert_weights(strategy, expected, 1e-5)
        assert turned == [True] * 3
        if strategy.name in ("single", "ddp"):  # nothing to be turned around in each step
            assert is_innermost(model[2].weight)
        strategy.teardown()
        assert not model[2]._forward_pre_hooks

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    @pytest.mark.parametrize("parts", [2, 4])
    def test_parts_of_uneven_size_equal_the_whole_batch(self, build: Any, optimizer: str, parts: int) -> None:
        strategy, forward = build(optimizer)
        for step in range(3):
            train_step(strategy, forward, batch(step), parts)
        assert_weights(strategy, reference(optimizer, 3)[0])

    @pytest.mark.parametrize("nonfinite", ["gradients", "loss", "off"])
    @pytest.mark.parametrize("clip", [0.05, 100.0])
    def test_clips_by_the_norm_of_all_gradients(self, build: Any, clip: float, nonfinite: str) -> None:
        strategy, forward = build(gradient_clip=clip, nonfinite=nonfinite)
        norms = [train_step(strategy, forward, batch(step)).norm for step in range(4)]
        model, expected = reference("sgd", 4, clip=clip)
        assert_weights(strategy, model)
        assert [float(n) for n in norms] == pytest.approx(expected, rel=1e-4)

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    @pytest.mark.parametrize("clip", [None, 1.0])
    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    def test_a_gradient_that_is_not_finite_changes_nothing(
        self, build: Any, optimizer: str, clip: float | None, value: float
    ) -> None:
        strategy, forward = build(optimizer, gradient_clip=clip)
        train_step(strategy, forward, batch(0))
        before = copy.deepcopy(strategy.state())
        assert was_skipped(train_step(strategy, forward, batch(1), factor=value))
        assert same(strategy.state(), before)
        assert not was_skipped(train_step(strategy, forward, batch(1)))
        assert_weights(strategy, reference(optimizer, 2, clip=clip)[0])

    def test_one_bad_sample_among_all_is_enough_to_skip(self, build: Any) -> None:
        strategy, forward = build()
        before = copy.deepcopy(strategy.state())
        x, y = batch(0)
        x[BATCH // 2, 0] = float("nan")
        assert was_skipped(train_step(strategy, forward, (x, y)))
        assert same(strategy.state(), before)

    def test_the_loss_can_decide_instead(self, build: Any) -> None:
        strategy, forward = build(nonfinite="loss")
        before = copy.deepcopy(strategy.state())
        assert was_skipped(train_step(strategy, forward, batch(0), factor=float("nan")))
        assert same(strategy.state(), before)
        assert not was_skipped(train_step(strategy, forward, batch(0)))
        assert_weights(strategy, reference("sgd", 1)[0])

    def test_the_guard_can_be_off(self, build: Any) -> None:
        strategy, forward = build(nonfinite="off")
        assert not was_skipped(train_step(strategy, forward, batch(0), factor=float("nan")))
        weights = strategy.state().get("model", {})
        assert strategy.rank != 0 or any(value.isnan().any() for value in weights.values())

    def test_gradients_are_cleared_by_a_step(self, build: Any) -> None:
        strategy, forward = build()
        train_step(strategy, forward, batch(0))
        assert all(p.grad is None or not p.grad.any() for p in forward.parameters())

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_state_goes_into_a_fresh_one_that_trains_on_identically(self, build: Any, optimizer: str) -> None:
        first, forward = build(optimizer)
        for step in range(3):
            train_step(first, forward, batch(step))
        state = from_rank_0(first, copy.deepcopy(first.state()))
        second, forward_second = build(optimizer)
        second.load_state(state)
        again = second.state()
        assert second.rank != 0 or same(again, state)
        for step in range(3, 6):
            train_step(first, forward, batch(step))
            train_step(second, forward_second, batch(step))
        assert same(second.state(), first.state())
        assert_weights(second, reference(optimizer, 6)[0])

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_state_goes_into_single_and_back(self, build: Any, optimizer: str) -> None:
        strategy, forward = build(optimizer)
        for step in range(2):
            train_step(strategy, forward, batch(step))
        alone = SingleDevice(Place(strategy.device))
        model = make_model().to(strategy.device)
        inner = alone.setup(model, OPTIMIZERS[optimizer](model), StepSettings())
        alone.load_state(from_rank_0(strategy, strategy.state()))
        for step in range(2, 4):
            train_step(alone, inner, batch(step))
        strategy.load_state(copy.deepcopy(alone.state()))
        for step in range(4, 6):
            train_step(strategy, forward, batch(step))
        assert_weights(strategy, reference(optimizer, 6)[0])

    def test_state_is_full_tensors_by_names_of_parameters(self, build: Any) -> None:
        strategy, forward = build("adamw")
        train_step(strategy, forward, batch(0))
        state, expected = from_rank_0(strategy, strategy.state()), make_model().state_dict()
        assert {n: v.shape for n, v in state["model"].items()} == {n: v.shape for n, v in expected.items()}
        optimizer = state["optimizer"]
        assert optimizer["kind"] == "AdamW"
        assert optimizer["state"].keys() == expected.keys()
        for name, values in optimizer["state"].items():
            assert values["exp_avg"].shape == expected[name].shape
        assert [sorted(group["params"]) for group in optimizer["groups"]] == [sorted(expected)]

    def test_weights_alone_can_be_loaded(self, build: Any) -> None:
        strategy, forward = build()
        train_step(strategy, forward, batch(0))
        weights = from_rank_0(strategy, copy.deepcopy(strategy.state()))["model"]
        other, _ = build("adamw")
        other.load_state({"model": weights})
        again = other.state()
        assert other.rank != 0 or same(again["model"], weights)

    def test_evaluates_without_an_optimizer(self, build: Any) -> None:
        strategy, forward = build(None)
        with torch.no_grad():
            x = batch(0)[0].to(strategy.device)
            torch.testing.assert_close(forward(x).cpu(), make_model()(batch(0)[0]), rtol=1e-5, atol=1e-5)
        assert "optimizer" not in strategy.state()
        other, _ = build("sgd")
        strategy.load_state(from_rank_0(other, other.state()))  # what it has no use for is left alone

    def test_weights_of_another_shape_are_refused_by_name(self, build: Any) -> None:
        strategy, _ = build()
        state = from_rank_0(strategy, copy.deepcopy(strategy.state()))
        state["model"]["2.weight"] = torch.zeros(4, 8)
        with pytest.raises(CheckpointError, match=r"2\.weight is \(4, 8\) there and \(3, 8\) here"):
            strategy.load_state(state)

    def test_weights_of_other_names_are_refused(self, build: Any) -> None:
        strategy, _ = build()
        state = from_rank_0(strategy, copy.deepcopy(strategy.state()))
        state["model"]["extra"] = state["model"].pop("2.bias")
        with pytest.raises(CheckpointError, match=r"missing \['2\.bias'\].*unknown \['extra'\]"):
            strategy.load_state(state)

    def test_the_state_of_another_optimizer_is_refused(self, build: Any) -> None:
        strategy, _ = build("sgd")
        other, _ = build("adamw")
        with pytest.raises(CheckpointError, match=r"AdamW.*SGD"):
            strategy.load_state(from_rank_0(other, other.state()))

    def test_reduce_is_the_sum_over_ranks(self, build: Any) -> None:
        strategy, _ = build()
        value = torch.tensor([1.0, strategy.rank], device=strategy.device)
        n = strategy.world_size
        assert strategy.reduce(value).tolist() == [n, n * (n - 1) / 2]

    def test_gather_gives_all_rows_in_rank_order(self, build: Any) -> None:
        strategy, _ = build()
        own = torch.full((strategy.rank + 1, 2), strategy.rank, device=strategy.device)  # lengths differ
        gathered = strategy.gather(own)
        assert gathered[:, 0].tolist() == [rank for rank in range(strategy.world_size) for _ in range(rank + 1)]

    def test_broadcast_gives_the_tensor_of_rank_0(self, build: Any) -> None:
        strategy, _ = build()
        value = torch.full((2, 3), float(strategy.rank + 5), device=strategy.device)
        assert strategy.broadcast(value).tolist() == [[5.0] * 3] * 2

    def test_values_of_all_ranks_come_in_rank_order(self, build: Any) -> None:
        strategy, _ = build()
        values = strategy.gather_values({"rank": strategy.rank, "text": "x" * strategy.rank})
        assert values == [{"rank": rank, "text": "x" * rank} for rank in range(strategy.world_size)]

    def test_barrier_comes_back(self, build: Any) -> None:
        strategy, _ = build()
        strategy.barrier()

    def test_teardown_gives_back_process_wide_settings(self, strategy_factory: Factory) -> None:
        before = (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)
        strategy = strategy_factory()
        model = make_model()
        strategy.setup(model, OPTIMIZERS["sgd"](model), StepSettings())
        strategy.teardown()
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before
