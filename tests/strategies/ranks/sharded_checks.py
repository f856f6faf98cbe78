"""What zero1, zero2, zero3 and fsdp must get right beyond the contract, run by every rank: see test_sharded.py."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.contract.strategy import share, train_step, was_skipped
from torch import Tensor, nn

from distributed_training.config import StrategyConfig
from distributed_training.models.gpt import GPT, GPTArguments
from distributed_training.runtime.errors import ConfigError, ModelError
from distributed_training.runtime.world import read_world
from distributed_training.strategies import Place, StepSettings, Strategy, make_strategy, sharding
from distributed_training.strategies.single import SingleDevice
from distributed_training.training.activations import enable_gradient_checkpointing
from distributed_training.training.agreement import from_rank_0

NAME = os.environ["STRATEGY"]
DIVIDES_WEIGHTS = NAME != "zero1"
TOLERANCE = 2e-6
Make = Callable[..., tuple[Strategy, nn.Module]]


@pytest.fixture(autouse=True)
def _small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models are divided into units here as large ones are elsewhere."""
    monkeypatch.setattr(sharding, "UNIT", 30)


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Strategy] = []

    def start(
        model: nn.Module, optimizer: torch.optim.Optimizer | None, alone: bool = False, **settings: Any
    ) -> tuple[Strategy, nn.Module]:
        options = settings.pop("options", {})
        device = torch.device("cpu")
        strategy = (
            SingleDevice(Place(device))
            if alone
            else make_strategy(Place(device, read_world(), StrategyConfig(name=NAME, **options), deadline=30))
        )
        made.append(strategy)
        return strategy, strategy.setup(model, optimizer, StepSettings(**settings))

    yield start
    for strategy in made:
        strategy.teardown()


class Tricky(nn.Module):
    """Tied weights, frozen ones, a layer with one row, one with fewer rows than ranks have, batch norm, two groups."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.table = nn.Linear(5, 7, bias=False)
        self.blocks = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(7, 7)])
        self.norm = nn.BatchNorm1d(7, momentum=None)
        self.narrow = nn.Linear(7, 1)
        self.back = nn.Linear(5, 7, bias=False)
        self.back.weight = self.table.weight
        self.head = nn.Linear(8, 3)
        for p in self.blocks[1].parameters():
            p.requires_grad = False

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.table(x)) + self.back(x)
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        return self.head(torch.cat([self.norm(h), self.narrow(h)], 1))

    def groups(self) -> list[dict[str, Any]]:
        trained = [p for p in self.parameters() if p.requires_grad]
        frozen = list(self.blocks[1].parameters())
        return [
            {"params": [p for p in trained if p.ndim > 1] + frozen, "weight_decay": 0.1},
            {"params": [p for p in trained if p.ndim <= 1], "lr": 0.03, "weight_decay": 0.0},
        ]


def rows(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(13, 5, generator=generator), torch.randint(3, (13,), generator=generator)


def compare(strategy: Strategy, alone: Strategy, tolerance: float = TOLERANCE) -> None:
    """Weights, buffers and the state of the optimizer."""
    state, expected = strategy.state(), alone.state()
    if strategy.rank:
        return
    close(state["model"], expected["model"], tolerance, "model")
    assert state["model"].keys() == expected["model"].keys()
    if "optimizer" in expected:
        assert [g["params"] for g in state["optimizer"]["groups"]] == [
            g["params"] for g in expected["optimizer"]["groups"]
        ]
        close(state["optimizer"], expected["optimizer"], tolerance, "optimizer")


def close(one: Any, other: Any, tolerance: float, name: str) -> None:
    if isinstance(other, Tensor):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, msg=lambda m: f"{name}: {m}")
    elif isinstance(other, dict):
        assert list(one) == list(other), name
        for key in other:
            close(one[key], other[key], tolerance, f"{name}.{key}")
    else:
        assert one == pytest.approx(other) if isinstance(other, float) else one == other, name


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.05),  # makes its state before the first step
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=0.01),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_tied_frozen_and_narrow_weights_in_two_groups_with_a_schedule(make: Make, kind: str) -> None:
    model = Tricky()
    twin = copy.deepcopy(model)
    optimizer, reference = OPTIMIZERS[kind](model.groups()), OPTIMIZERS[kind](twin.groups())
    strategy, forward = make(model, optimizer, gradient_clip=0.7, options={"sync_batchnorm": True})
    alone, forward_alone = make(twin, reference, alone=True, gradient_clip=0.7)
    torch_schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.8) for o in (optimizer, reference)]
    for step in range(4):
        one = train_step(strategy, forward, rows(step))
        other = train_step(alone, forward_alone, rows(step))
        assert float(one.norm) == pytest.approx(float(other.norm), rel=1e-5)  # type: ignore[arg-type]
        for schedule in torch_schedules:
            schedule.step()
        for o in (optimizer, reference):
            o.param_groups[1]["lr"] *= 1.5  # by hand, as our own schedule does
    compare(strategy, alone)
    # Into a fresh one on all ranks, which goes on as if nothing had happened.
    state = from_rank_0(strategy, strategy.state())
    again = Tricky()
    optimizer_again = OPTIMIZERS[kind](again.groups())
    second, forward_second = make(again, optimizer_again, gradient_clip=0.7, options={"sync_batchnorm": True})
    second.load_state(state)
    assert optimizer_again.param_groups[1]["lr"] == pytest.approx(reference.param_groups[1]["lr"])
    train_step(second, forward_second, rows(9))
    train_step(alone, forward_alone, rows(9))
    compare(second, alone)


def test_each_rank_keeps_its_part_only(make: Make) -> None:
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)])
    whole = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    strategy, forward = make(model, optimizer)
    strategy.backward(forward(torch.randn(2, 16)).sum())
    strategy.step(torch.tensor(0.0))
    state = from_rank_0(strategy, strategy.state())
    strategy.load_state(state)
    kept = sum(v.numel() for values in optimizer.state.values() for v in values.values() if v.ndim)
    bytes_kept = sum(
        v.untyped_storage().nbytes() for values in optimizer.state.values() for v in values.values() if v.ndim
    )
    assert kept == pytest.approx(2 * whole / strategy.world_size, rel=0.4)
    assert bytes_kept == 4 * kept  # not views of the whole
    if DIVIDES_WEIGHTS:
        own = sum(p.to_local().numel() for p in model.parameters())  # type: ignore[operator]
        assert own == pytest.approx(whole / strategy.world_size, rel=0.4)


@pytest.mark.parametrize("bad_row", [0, 3])
@pytest.mark.parametrize("settings", [{}, {"gradient_clip": 1.0}, {"precision": "fp16"}])
def test_one_bad_shard_is_enough_to_skip_on_all_ranks(make: Make, bad_row: int, settings: dict[str, Any]) -> None:
    """Only one row of the weight, so only one rank's shard of its gradient, is not finite."""
    model = nn.Linear(5, 4, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy, forward = make(model, optimizer, **settings)
    if settings.get("precision") == "fp16":
        strategy._scaler._init_scale = 0.5  # type: ignore[attr-defined]  # below 1 an overflow counts as a skipped step
    factor = torch.ones(4)
    factor[bad_row] = float("inf")
    for weights, skipped in ((factor, True), (torch.ones(4), False)):
        with strategy.autocast():
            loss = (forward(torch.ones(2, 5)).float() * weights).sum() / 100
        strategy.backward(loss)
        result = strategy.step(torch.tensor(1.0))
        assert was_skipped(result) is skipped
        state = strategy.state()
        changed = strategy.rank == 0 and not bool((state["model"]["weight"] == 1).all())
        assert changed is (strategy.rank == 0 and not skipped)
    if settings.get("precision") == "fp16":
        scales = strategy.gather_values(strategy._scaler.get_scale())  # type: ignore[attr-defined]
        assert scales == [0.25] * strategy.world_size


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_is_that_of_one_device(make: Make, precision: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3))
    twin = copy.deepcopy(model)
    strategy, forward = make(model, torch.optim.SGD(model.parameters(), lr=0.1), precision=precision)
    alone, forward_alone = make(twin, torch.optim.SGD(twin.parameters(), lr=0.1), alone=True, precision=precision)
    for step in range(4):
        train_step(strategy, forward, rows(step), parts=2)
        train_step(alone, forward_alone, rows(step), parts=2)
    compare(strategy, alone, tolerance=3e-3)


@pytest.mark.parametrize("own_switch", [True, False])
@pytest.mark.parametrize("parts", [1, 2])
def test_gradient_checkpointing_and_a_model_that_gives_a_dict(make: Make, own_switch: bool, parts: int) -> None:
    model = GPT(GPTArguments(vocab_size=11, context=6, layers=2, heads=2, width=8))
    twin = copy.deepcopy(model)
    if own_switch:
        enable_gradient_checkpointing(model)
    else:
        for block in model.blocks:
            enable_gradient_checkpointing(nn.Sequential(block))
    # Not Adam: the gradient of the keys' bias is zero but for rounding, which Adam would blow up.
    strategy, forward = make(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    alone, forward_alone = make(twin, torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9), alone=True)
    for step in range(3):
        ids = torch.randint(11, (13, 6), generator=torch.Generator().manual_seed(step))
        for each, run in ((strategy, forward), (alone, forward_alone)):
            own = share(each, (ids, ids))[0]
            pieces = own.tensor_split(parts)
            for number, piece in enumerate(pieces, 1):
                with each.micro_batch(last=number == parts):
                    each.backward(run(piece, labels=piece)["loss"] * len(piece) / 13)
            each.step(torch.tensor(0.0))
    compare(strategy, alone)


def test_an_evaluation_between_loading_and_saving_hides_nothing(make: Make) -> None:
    model = Tricky()
    strategy, forward = make(model, torch.optim.SGD(model.parameters(), lr=0.1))
    train_step(strategy, forward, rows(0))
    before = copy.deepcopy(from_rank_0(strategy, strategy.state()))
    train_step(strategy, forward, rows(1))
    forward.eval()
    with torch.no_grad():
        forward(rows(2)[0])
    strategy.load_state(before)
    again = from_rank_0(strategy, strategy.state())
    close(again["model"], before["model"], 0.0, "model")
    plain = Tricky().eval()
    plain.load_state_dict(before["model"])
    with torch.no_grad():
        torch.testing.assert_close(forward(rows(2)[0]), plain(rows(2)[0]), rtol=1e-5, atol=1e-6)


def test_ranks_evaluate_with_the_same_statistics(make: Make) -> None:
    """Batch norm saw other samples on each rank; predictions must not depend on who makes them."""
    model = Tricky()
    strategy, forward = make(model, torch.optim.SGD(model.parameters(), lr=0.1))
    train_step(strategy, forward, rows(0))
    forward.eval()
    with torch.no_grad():
        everyone = strategy.gather(forward(rows(2)[0])[None])
    assert all(torch.equal(one, everyone[0]) for one in everyone)


class ByNorm(torch.optim.Optimizer):
    """Steps of the length of the parameter itself: wrong for a shard taken for the whole."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["last"] = p.grad.norm()
                    state["mean"] = state.get("mean", torch.zeros_like(p)) * 0.9 + p.grad
                    p.sub_(state["mean"] / (state["last"] + 1e-3) * p.norm() * group["lr"])


def test_an_optimizer_that_looks_at_whole_parameters_sees_whole_parameters(make: Make) -> None:
    model, twin = (nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3)) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    strategy, forward = make(model, ByNorm(model.parameters(), 0.1), gradient_clip=0.5)
    twin.load_state_dict(from_rank_0(strategy, strategy.state())["model"])
    alone, forward_alone = make(twin, ByNorm(twin.parameters(), 0.1), alone=True, gradient_clip=0.5)
    for step in range(4):
        train_step(strategy, forward, rows(step))
        train_step(alone, forward_alone, rows(step))
        if step == 1:
            strategy.load_state(from_rank_0(strategy, strategy.state()))
    compare(strategy, alone, tolerance=1e-5)


def test_what_cannot_be_divided_is_refused(make: Make) -> None:
    if not DIVIDES_WEIGHTS:
        return
    model = nn.Linear(3, 3)
    model.temperature = nn.Parameter(torch.tensor(1.0))  # type: ignore[assignment]
    with pytest.raises(ModelError, match=r"temperature .*shape \(1,\)"):
        make(model, None)
    model = nn.Linear(3, 3)
    outside = nn.Parameter(torch.ones(2))
    with pytest.raises(ModelError, match="not the model's"):
        make(model, torch.optim.SGD([*model.parameters(), outside], lr=0.1))
    with pytest.raises(ConfigError, match=r"strategy\.compression=fp16"):
        make(model, None, options={"compression": "fp16"})


def test_parameters_that_only_some_ranks_use(make: Make) -> None:
    torch.manual_seed(1)
    model = nn.ModuleDict({"always": nn.Linear(5, 3), "sometimes": nn.Linear(5, 3)})
    net = _Routed(model)
    twin = copy.deepcopy(net)
    strategy, forward = make(net, torch.optim.SGD(net.parameters(), lr=0.1), options={"find_unused_parameters": True})
    alone, _ = make(twin, torch.optim.SGD(twin.parameters(), lr=0.1), alone=True)
    x, y = rows(0)
    own, targets = share(strategy, (x, y))
    strategy.backward(F.cross_entropy(forward(own, strategy.rank == 0), targets, reduction="sum") / 13)
    strategy.step(torch.tensor(0.0))
    first = len(share(strategy, (x, y))[0]) if strategy.rank == 0 else 13 // strategy.world_size
    parts = [(x[:first], y[:first], True), (x[first:], y[first:], False)]
    for inputs, labels, routed in parts:
        alone.backward(F.cross_entropy(twin(inputs, routed), labels, reduction="sum") / 13)
    alone.step(torch.tensor(0.0))
    compare(strategy, alone)


class _Routed(nn.Module):
    def __init__(self, layers: nn.ModuleDict) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor, both: bool) -> Tensor:
        out = self.layers["always"](x)
        return out + self.layers["sometimes"](x) if both else out


def test_zero1_refuses_what_torch_refuses(make: Make) -> None:
    if DIVIDES_WEIGHTS:
        return
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 3).double())
    with pytest.raises(ModelError, match="use strategy=ddp"):
        make(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_compression_and_static_graph_of_ddp(make: Make) -> None:
    if DIVIDES_WEIGHTS:
        return
    model = nn.Linear(5, 3)
    strategy, forward = make(
        model, torch.optim.SGD(model.parameters(), lr=0.1), options={"compression": "bf16", "static_graph": True}
    )
    assert not strategy.exact
    for step in range(3):
        assert not was_skipped(train_step(strategy, forward, rows(step)))
