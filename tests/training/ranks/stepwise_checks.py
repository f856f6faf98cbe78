"""A loop of one's own on several ranks, run by every rank of a job: see test_ranks_stepwise.py for who starts it.

Each rank computes beside it what one process with the whole batch would come to.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.training.by_hand import CLASSES, adam, assert_same, batches, close, network, plain_loop
from torch import Tensor, nn

from distributed_training.runtime.errors import ConfigError, ModelError, RanksError

CE = nn.CrossEntropyLoss()
SIZES = (13, 13, 7, 1, 2, 13)  # nothing that 2 or 3 divides; fewer samples than ranks
FOLDER = Path(os.environ["FOLDER"])


@pytest.mark.parametrize("strategy", ["auto", "zero1"])
def test_uneven_batches_and_an_optimizer_made_anew(trainer_for: Any, strategy: str) -> None:
    net, expected = network(), network()
    trainer = trainer_for(net, strategy=strategy)
    assert trainer.world_size == int(os.environ["RANKS"])
    if trainer.rank:  # rank 0's weights are those that count
        with torch.no_grad():
            net[0].weight.zero_()
    losses = [trainer.train_step(x, y, CE, adam(net)) for x, y in batches(SIZES)]
    assert losses == close(plain_loop(expected, batches(SIZES), CE))
    assert_same(net, expected)


WEIGHTS = torch.tensor([0.2, 3.0, 1.0])


def own_mean(out: Tensor, y: Tensor) -> Tensor:
    return (out.softmax(1)[:, 0] - y).abs().mean()


def own_sum(out: Tensor, y: Tensor) -> Tensor:
    return (out.softmax(1)[:, 0] - y).abs().sum()


@pytest.mark.parametrize(
    "criterion",
    [
        nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=1, label_smoothing=0.1),
        nn.CrossEntropyLoss(reduction="sum"),
        functools.partial(F.cross_entropy, ignore_index=0),
        own_mean,
        own_sum,
    ],
    ids=["weights", "sum", "function", "own-mean", "own-sum"],
)
def test_criteria_are_put_together_by_what_they_divide_by(trainer_for: Any, criterion: Any) -> None:
    net, expected, data = network(), network(), batches((13, 7, 2, 13))
    data[1][1][:4] = data[1][1][4]  # labels that ranks have unequally
    trainer = trainer_for(net)
    losses = [trainer.train_step(x, y, criterion, adam(net)) for x, y in data]
    evaluated = trainer.evaluate_step(*data[0], criterion).loss
    assert losses == close(plain_loop(expected, data, criterion))
    assert evaluated == pytest.approx(criterion(expected(data[0][0]), data[0][1]).item(), rel=1e-5)
    assert_same(net, expected)


def test_a_rank_whose_targets_are_all_ignored(trainer_for: Any) -> None:
    net, expected, (x, y) = network(), network(), batches([12])[0]
    y[:6] = -100
    losses = [trainer_for(net).train_step(x, y, CE, adam(net))]
    assert losses == close(plain_loop(expected, [(x, y)], CE))
    assert_same(net, expected)


@pytest.mark.parametrize(
    ("criterion", "targets", "said"),
    [
        (lambda out, y: F.cross_entropy(out, y).sqrt(), None, "neither the mean nor the sum"),
        (lambda out, y: out.var(), None, "neither the mean nor the sum"),
        (nn.MSELoss(), torch.zeros(12), "compare every sample with every other"),
        (nn.BCEWithLogitsLoss(weight=torch.ones(12, CLASSES)), torch.zeros(12, CLASSES), "a weight for every sample"),
    ],
)
def test_criteria_that_cannot_be_shared_are_refused(trainer_for: Any, criterion: Any, targets: Any, said: str) -> None:
    net, (x, y) = network(), batches([12])[0]
    with pytest.raises(ModelError, match=said):
        trainer_for(net).train_step(x, y if targets is None else targets, criterion, adam(net))


def test_accumulation_sends_nothing_in_between(trainer_for: Any) -> None:
    net, expected, data = network(), network(), batches((13, 7, 1, 5, 6, 2))
    trainer = trainer_for(net, gradient_accumulation_steps=3)
    losses = []
    for number, (x, y) in enumerate(data, 1):
        losses.append(trainer.train_step(x, y, CE, adam(net)))
        if number == 1:  # its own gradient, not that of all
            gradients = trainer.strategy.gather(net[0].weight.grad[None].clone())
            assert not torch.equal(gradients[0], gradients[1])
    assert losses == close(plain_loop(expected, data, CE, accumulate=3))
    assert_same(net, expected)


def test_a_rate_for_all_devices(trainer_for: Any) -> None:
    net, expected, data = network(), network(), batches((13, 7))
    trainer = trainer_for(net, scale_learning_rate=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for x, y in data:
        trainer.train_step(x, y, CE, optimizer)
        assert optimizer.param_groups[0]["lr"] == 0.1
    plain_loop(expected, data, CE, torch.optim.SGD(expected.parameters(), lr=0.1 * trainer.world_size))
    assert_same(net, expected)


@pytest.mark.parametrize("size", [13, 1])
def test_outputs_come_back_whole_and_in_order(trainer_for: Any, size: int) -> None:
    net, (x, y) = network(), batches([size])[0]
    loss, outputs = trainer_for(net).evaluate_step(x, y, CE)
    torch.testing.assert_close(outputs, network()(x).detach())
    assert loss == pytest.approx(CE(network()(x), y).item(), rel=1e-5)


def test_other_batches_on_a_rank_are_an_error_that_names_it(trainer_for: Any) -> None:
    net, (x, y) = network(), batches([12])[0]
    trainer = trainer_for(net)
    with pytest.raises(RanksError, match=r"train_step 0: the ranks differ: hash of inputs is .* on rank.* 1"):
        trainer.train_step(x + (trainer.rank == 1), y, CE, adam(net))
    rows = slice(0, 11 if trainer.rank == 1 else 12)
    with pytest.raises(RanksError, match=r"samples is 12 on .* and 11 on rank 1"):
        trainer.train_step(x[rows], y[rows], CE, adam(net))


def test_other_sizes_are_seen_in_every_step(trainer_for: Any) -> None:
    net, (x, y) = network(), batches([12])[0]
    trainer = trainer_for(net, check_batches=0)
    trainer.train_step(x, y, CE, adam(net))
    rows = slice(0, 11 if trainer.rank == 1 else 12)
    with pytest.raises(RanksError, match=r"the batch: the ranks differ: samples is 12 on .* and 11 on rank 1"):
        trainer.train_step(x[rows], y[rows], CE, adam(net))


def test_ranks_go_on_drawing_alike_and_drop_out_differently(trainer_for: Any) -> None:
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 1))
    trainer = trainer_for(net, check_batches=True)
    torch.manual_seed(4)
    dropped = []
    net[0].register_forward_hook(lambda module, inputs, output: dropped.append((output == 0)[0].float()))
    for _ in range(5):  # would be refused if the generators went apart
        x = torch.rand(int(torch.randint(5, 9, ())), 64) + 1
        trainer.train_step(x, x.sum(1, keepdim=True), nn.MSELoss(), torch.optim.SGD(net.parameters(), 1e-6))
    masks = trainer.strategy.gather(torch.stack(dropped)[None])
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0][0], masks[0][1])


def test_nested_batches(trainer_for: Any) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, x: Tensor, scale: Tensor) -> dict[str, Tensor]:
            return {"logits": self.inner(x) * scale[:, None]}

    def loss(out: dict[str, Tensor], targets: tuple[Tensor, ...]) -> Tensor:
        return F.cross_entropy(out["logits"], targets[0]) + out["logits"].square().mean()

    net, (x, y) = Two(), batches([7])[0]
    scale = torch.linspace(0.5, 2, 7)
    wanted = loss(Two()(x, scale), (y,)).item()
    trainer = trainer_for(net)
    evaluation = trainer.evaluate_step({"x": x, "scale": scale}, (y,), loss)
    assert trainer.train_step({"x": x, "scale": scale}, (y,), loss, adam(net)) == pytest.approx(wanted, rel=1e-5)
    torch.testing.assert_close(evaluation.outputs["logits"], Two()(x, scale)["logits"].detach())


def test_a_strategy_that_replaces_parameters_is_refused(trainer_for: Any) -> None:
    net, (x, y) = network(), batches([12])[0]
    with pytest.raises(ConfigError, match=r"strategy=zero3 puts parameters of its own into the model"):
        trainer_for(net, strategy="zero3").train_step(x, y, CE, adam(net))


def test_save_here_and_go_on_here_or_in_one_process(trainer_for: Any) -> None:
    """The outer test loads what this leaves."""
    data, net, expected = batches((13, 7, 13, 5)), network(), network()
    plain_loop(expected, data, CE)
    trainer = trainer_for(net)
    for x, y in data[:2]:
        trainer.train_step(x, y, CE, adam(net))
    path = trainer.save(FOLDER / "saved")
    resumed = trainer_for(other := network(seed=8 + trainer.rank))
    assert resumed.load(FOLDER / "saved") == path
    for x, y in data[2:]:
        resumed.train_step(x, y, CE, adam(other))
    assert_same(other, expected)
