"""What Horovod adds to the contract, run by every rank under horovodrun: see tests/strategies/test_horovod.py."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.contract.strategy import (
    BATCH,
    FEATURES,
    OPTIMIZERS,
    assert_weights,
    batch,
    make_model,
    reference,
    share,
    train_step,
    was_skipped,
)
from torch import Tensor, nn

from distributed_training.config import StrategyConfig
from distributed_training.runtime.errors import ConfigError, ModelError, RanksError
from distributed_training.runtime.world import read_world
from distributed_training.strategies import Place, StepSettings, Strategy, make_strategy

Build = Callable[..., Strategy]


@pytest.fixture
def build() -> Iterator[Build]:
    """Make a strategy with some options; all are torn down at the end."""
    made: list[Strategy] = []

    def make(**options: Any) -> Strategy:
        place = Place(torch.device("cpu"), read_world(), StrategyConfig(name="horovod", **options), deadline=30)
        made.append(make_strategy(place))
        return made[-1]

    yield make
    for strategy in made:
        strategy.teardown()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return OPTIMIZERS["sgd"](model)


class TestValuesBetweenRanks:
    VALUES = [
        torch.tensor([1.5, 2.0], dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([[1], [2]], dtype=torch.int16),
        torch.tensor([1 + 2j]),
        torch.zeros((0, 3)),
    ]

    @pytest.mark.parametrize("value", VALUES, ids=str)
    def test_gathers_and_broadcasts_every_type(self, build: Build, value: Tensor) -> None:
        strategy = build()
        assert torch.equal(strategy.gather(value), torch.cat([value] * strategy.world_size))
        own = value.clone() if strategy.rank == 0 else torch.zeros_like(value)
        assert torch.equal(strategy.broadcast(own), value)
        assert torch.equal(own, value)

    def test_broadcasts_into_any_layout(self, build: Build) -> None:
        strategy = build()
        turned = torch.full((2, 3), float(strategy.rank)).t()
        strategy.broadcast(turned)
        assert not turned.any()
        number = torch.tensor(strategy.rank + 7.0)
        assert float(strategy.broadcast(number)) == 7

    @pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64, torch.uint8, torch.int64])
    def test_adds_up_every_type(self, build: Build, kind: torch.dtype) -> None:
        strategy = build()
        total = strategy.reduce(torch.tensor(3, dtype=kind))
        assert total.dtype == kind
        assert total.shape == ()
        assert float(total) == 3 * strategy.world_size

    def test_a_rank_may_have_no_rows(self, build: Build) -> None:
        strategy = build()
        rows = strategy.gather(torch.ones(strategy.rank * 2, 3))
        assert rows.shape == (sum(2 * rank for rank in range(strategy.world_size)), 3)


class TestStartingAlike:
    def test_weights_and_buffers_of_rank_0(self, build: Build) -> None:
        strategy = build()
        model = nn.Sequential(make_model(), nn.BatchNorm1d(3))
        model.register_buffer("flags", torch.tensor([strategy.rank == 0]))
        with torch.no_grad():
            for tensor in model.parameters():
                tensor += strategy.rank
        strategy.setup(model, sgd(model), StepSettings())
        assert torch.equal(model[0][0].weight, make_model()[0].weight)
        assert model.get_buffer("flags").item()

    def test_optimizer_state_of_rank_0(self, build: Build) -> None:
        strategy = build()
        model = make_model()
        optimizer = OPTIMIZERS["adamw"](model)
        F.cross_entropy(model(batch(0)[0]) * (1 + strategy.rank), batch(0)[1]).backward()
        for _ in range(strategy.rank + 1):
            optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.5 + strategy.rank
        strategy.setup(model, optimizer, StepSettings())
        state = optimizer.state[model[0].weight]
        assert float(state["step"]) == 1
        assert optimizer.param_groups[0]["lr"] == 0.5
        average = strategy.reduce(state["exp_avg"]) / strategy.world_size
        torch.testing.assert_close(average, state["exp_avg"])

    def test_an_optimizer_that_only_some_ranks_have_used_is_refused(self, build: Build) -> None:
        strategy, model = build(), make_model()
        optimizer = sgd(model)
        if strategy.rank == 0:
            F.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
            optimizer.step()
        with pytest.raises(RanksError, match="rank 0 has taken steps and that of rank 1 has not"):
            strategy.setup(model, optimizer, StepSettings())

    def test_what_horovod_cannot_send_is_refused(self, build: Build) -> None:
        strategy = build()
        half = make_model().bfloat16()
        with pytest.raises(ModelError, match=r"0\.weight is bfloat16"):
            strategy.setup(half, sgd(half), StepSettings())
        images = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        with pytest.raises(ModelError, match=r"weight is not contiguous.*channels_last"):
            strategy.setup(images, sgd(images), StepSettings())

    def test_an_optimizer_that_horovod_has_wrapped_is_refused(self, build: Build) -> None:
        import horovod.torch as hvd

        strategy, model = build(), make_model()
        with pytest.raises(ConfigError, match="give the plain one"):
            strategy.setup(model, hvd.DistributedOptimizer(sgd(model)), StepSettings())

    def test_other_compressions_are_refused(self, build: Build) -> None:
        with pytest.raises(ConfigError, match="compression=powersgd is nothing that Horovod can do: use none or fp16"):
            build(compression="powersgd")


class TestSteps:
    def test_gradients_travel_only_in_the_last_of_any_number_of_parts(self, build: Build) -> None:
        strategy, model = build(), make_model()
        forward = strategy.setup(model, sgd(model), StepSettings())
        for step, parts in enumerate([3, 1, 4, 2]):
            x, y = share(strategy, batch(step))
            losses = [
                F.cross_entropy(forward(rows), labels, reduction="sum") / BATCH
                for rows, labels in zip(x.tensor_split(parts), y.tensor_split(parts))
            ]
            own = torch.autograd.grad(sum(losses[:-1]), model[0].weight, retain_graph=True)[0] if parts > 1 else None
            for number, loss in enumerate(losses, 1):
                with strategy.micro_batch(last=number == parts):
                    strategy.backward(loss)
                if number == parts - 1:
                    torch.testing.assert_close(model[0].weight.grad, own)
            strategy.step(sum(losses).detach())  # type: ignore[union-attr]
        assert_weights(strategy, reference("sgd", 4)[0])

    def test_rates_set_on_the_users_optimizer_count(self, build: Build) -> None:
        strategy, model = build(), make_model()
        optimizer = sgd(model)
        forward = strategy.setup(model, optimizer, StepSettings())
        optimizer.param_groups[0]["lr"] = 0.0
        before = copy.deepcopy(strategy.state()["model"])
        train_step(strategy, forward, batch(0))
        assert all(torch.equal(value, before[name]) for name, value in strategy.state()["model"].items())

    def test_an_optimizer_whose_class_needs_arguments(self, build: Build) -> None:
        class Own(torch.optim.SGD):
            def __init__(self, parameters: Any, rate: float) -> None:
                super().__init__(parameters, lr=rate, momentum=0.9, weight_decay=0.01)

        strategy, model = build(), make_model()
        forward = strategy.setup(model, Own(model.parameters(), 0.1), StepSettings())
        for step in range(3):
            train_step(strategy, forward, batch(step))
        assert_weights(strategy, reference("sgd", 3)[0])

    def test_compressed_gradients_train_nearly_alike(self, build: Build) -> None:
        strategy, model = build(compression="fp16"), make_model()
        assert not strategy.exact
        forward = strategy.setup(model, sgd(model), StepSettings())
        for step in range(3):
            train_step(strategy, forward, batch(step))
        expected = reference("sgd", 3)[0]
        assert_weights(strategy, expected, 1e-2)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(model[0].weight, expected[0].weight, rtol=1e-7, atol=1e-7)  # type: ignore[index]

    @pytest.mark.parametrize("compression", ["none", "fp16"])
    def test_scaled_losses(self, build: Build, compression: str) -> None:
        """The first scales are too large for fp16 on the wire: all ranks skip these steps together."""
        strategy, model = build(compression=compression), make_model()
        forward = strategy.setup(model, sgd(model), StepSettings(precision="fp16", gradient_clip=1.0))
        before = copy.deepcopy(model)
        for _ in range(12):
            assert not was_skipped(train_step(strategy, forward, batch(0)))
        spread = strategy.gather(model[0].weight.detach()[None])
        assert torch.equal(spread[0], spread[1])
        assert not torch.equal(model[0].weight, before[0].weight)  # type: ignore[index]
        assert was_skipped(train_step(strategy, forward, batch(0), factor=float("nan")))

    def test_recomputed_activations_and_tied_weights(self, build: Build) -> None:
        from torch.utils.checkpoint import checkpoint

        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(3)
                self.first = nn.Linear(FEATURES, FEATURES)
                self.second = nn.Linear(FEATURES, FEATURES)
                self.second.weight = self.first.weight

            def forward(self, x: Tensor) -> Tensor:
                return self.second(checkpoint(self.first, x, use_reentrant=False).tanh())  # type: ignore[no-any-return]

        strategy, model, alone = build(), Tied(), Tied()
        forward, optimizer = strategy.setup(model, sgd(model), StepSettings()), sgd(alone)
        for step in range(3):
            train_step(strategy, forward, batch(step))
            x, y = batch(step)
            optimizer.zero_grad()
            F.cross_entropy(alone(x), y).backward()
            optimizer.step()
        assert_weights(strategy, alone)

    def test_batch_norm_over_all_ranks(self, build: Build) -> None:
        def network() -> nn.Module:
            return nn.Sequential(make_model(), nn.BatchNorm1d(3))

        strategy, model, alone = build(sync_batchnorm=True), network(), network()
        forward, optimizer = strategy.setup(model, sgd(model), StepSettings()), sgd(alone)
        for step in range(3):
            train_step(strategy, forward, batch(step))
            x, y = batch(step)
            optimizer.zero_grad()
            F.cross_entropy(alone(x), y).backward()
            optimizer.step()
        assert_weights(strategy, alone, 1e-5)


class Branches(nn.Module):
    """Some of its parts have no say in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = make_model(), nn.Linear(FEATURES, 3), nn.Linear(FEATURES, 3)
        with torch.no_grad():
            for p in [*self.sometimes.parameters(), *self.never.parameters()]:
                p.fill_(0.1)

    def forward(self, x: Tensor, wanted: bool) -> Tensor:
        result: Tensor = self.always(x)
        return result + self.sometimes(x) if wanted else result


class TwoWays(nn.Module):
    """A batch goes one way or the other."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = make_model(), make_model()

    def forward(self, x: Tensor, left: bool) -> Tensor:
        result: Tensor = self.left(x) if left else self.right(x)
        return result


class TestParametersWithoutAGradient:
    def step(self, strategy: Strategy, forward: nn.Module, step: int, wanted: bool) -> None:
        x, y = share(strategy, batch(step))
        loss = F.cross_entropy(forward(x, wanted), y, reduction="sum") / BATCH
        strategy.backward(loss)
        strategy.step(loss.detach())

    def test_are_as_on_one_device(self, build: Build) -> None:
        """Used by one rank only, by all, by none: momentum and weight decay must not move what nobody used."""
        strategy, model, alone = build(find_unused_parameters=True), Branches(), Branches()
        forward, optimizer = strategy.setup(model, sgd(model), StepSettings()), sgd(alone)
        for step, users in enumerate([{1}, {0, 1}, set(), {0}, set()]):
            self.step(strategy, forward, step, strategy.rank in users)
            x, y = batch(step)
            half = BATCH // 2
            optimizer.zero_grad()
            parts = [(x[:half], y[:half], 0 in users), (x[half:], y[half:], 1 in users)]
            sum(F.cross_entropy(alone(a, w), b, reduction="sum") / BATCH for a, b, w in parts).backward()  # type: ignore[union-attr]
            optimizer.step()
        assert_weights(strategy, alone)

    def test_two_ranks_each_without_what_the_other_has(self, build: Build) -> None:
        """Each waits for zeros that the other has still to send."""
        strategy, model, alone = build(find_unused_parameters=True), TwoWays(), TwoWays()
        forward, optimizer = strategy.setup(model, sgd(model), StepSettings()), sgd(alone)
        for step in range(3):
            self.step(strategy, forward, step, strategy.rank == 0)
            x, y = batch(step)
            half = BATCH // 2
            optimizer.zero_grad()
            parts = [(x[:half], y[:half], True), (x[half:], y[half:], False)]
            sum(F.cross_entropy(alone(a, w), b, reduction="sum") / BATCH for a, b, w in parts).backward()  # type: ignore[union-attr]
            optimizer.step()
        assert_weights(strategy, alone)

    def test_are_refused_by_name_unless_announced(self, build: Build) -> None:
        strategy, model = build(), Branches()
        forward = strategy.setup(model, sgd(model), StepSettings())
        with pytest.raises(ModelError, match=r"never\.weight, never\.bias got no gradient in step 0.*find_unused"):
            self.step(strategy, forward, 0, True)
        for p in model.parameters():  # what was on its way
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        strategy._exchange.synchronize()  # type: ignore[attr-defined]


def test_after_teardown_a_rank_may_use_the_model_alone(build: Build) -> None:
    strategy, model = build(), make_model()
    strategy.setup(model, sgd(model), StepSettings())
    rank = strategy.rank
    strategy.teardown()
    if rank == 0:
        for _ in range(3):
            F.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
    build().barrier()
