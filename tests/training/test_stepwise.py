"""A loop of one's own in one process: the plain torch loop, whether the optimizer is kept or made anew."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.training.by_hand import CLASSES, FEATURES, adam, assert_same, batches, close, network, plain_loop
from torch import Tensor, nn

from distributed_training import Config, create_distributed_trainer
from distributed_training.runtime.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    ModelError,
    TrainingDivergedError,
)

CE = nn.CrossEntropyLoss()
SIZES = (13, 13, 7, 1, 13)


@pytest.mark.parametrize("anew", [True, False])
def test_it_is_the_plain_loop(trainer_for: Any, anew: bool) -> None:
    """Adam without its moments would go elsewhere at once: made anew, it has kept them."""
    net, expected = network(), network()
    trainer, kept = trainer_for(net), adam(net)
    losses = [trainer.train_step(x, y, CE, adam(net) if anew else kept) for x, y in batches(SIZES)]
    assert losses == close(plain_loop(expected, batches(SIZES), CE))
    assert_same(net, expected)
    assert trainer.steps == len(SIZES)


def test_num_gpus_without_gpus_means_the_cpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there are GPUs")
    net = network()
    with create_distributed_trainer(net, num_gpus=2) as trainer:
        x, y = batches([4])[0]
        loss = trainer.train_step(inputs=x, targets=y, criterion=CE, optimizer=adam(net))
    assert loss == pytest.approx(CE(network()(x), y).item(), rel=1e-6)


def test_a_new_learning_rate_is_taken_over(trainer_for: Any) -> None:
    net, expected, data = network(), network(), batches(SIZES)
    trainer, optimizer = trainer_for(net), adam(expected)
    for (x, y), rate in zip(data, (0.01, 0.02, 0.005, 0.1, 0.01)):
        trainer.train_step(x, y, CE, torch.optim.Adam(net.parameters(), lr=rate))
        optimizer.param_groups[0]["lr"] = rate
        plain_loop(expected, [(x, y)], CE, optimizer)
    assert_same(net, expected)


def test_a_scheduler_on_a_kept_optimizer_counts(trainer_for: Any) -> None:
    net, expected, data = network(), network(), batches(SIZES)
    trainer = trainer_for(net, scale_learning_rate=True)  # one device: times one
    for model, step in ((net, trainer.train_step), (expected, None)):
        optimizer = adam(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
        for x, y in data:
            if step is not None:
                step(x, y, CE, optimizer)
            else:
                plain_loop(model, [(x, y)], CE, optimizer)
            scheduler.step()
    assert_same(net, expected)


def other_groups(net: nn.Module) -> torch.optim.Optimizer:
    first, *rest = net.parameters()
    return torch.optim.Adam([{"params": [first]}, {"params": rest}], lr=0.01)


def used(net: nn.Module) -> torch.optim.Optimizer:
    optimizer = adam(net)
    net(torch.zeros(1, FEATURES)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda net: torch.optim.SGD(net.parameters(), 0.01), r"trains with Adam, but was given a SGD"),
        (lambda net: torch.optim.Adam(net[0].parameters(), 0.01), r"over 4 parameters, but the new one lacks 2\.bias"),
        (lambda net: adam(network()), r"the new one holds others"),
        (other_groups, r"1 groups of parameters, but the new one has 2"),
        (lambda net: torch.optim.Adam(net.parameters(), betas=(0.5, 0.9)), r"betas was \(0\.9, 0\.999\) and is"),
        (used, r"has a state of its own"),
        (lambda net: None, r"given a NoneType"),
    ],
)
def test_an_optimizer_that_is_not_the_first_is_refused(trainer_for: Any, other: Any, said: str) -> None:
    net = network()
    trainer, (x, y) = trainer_for(net), batches([4])[0]
    trainer.train_step(x, y, CE, adam(net))
    with pytest.raises(ConfigError, match=said):
        trainer.train_step(x, y, CE, other(net))
    trainer.train_step(x, y, CE, adam(net))


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (lambda net: adam(network()), r"4 of the 4 parameters of this Adam are not those of the model \(Sequential\)"),
        (lambda net: torch.optim.Adam(net[0].parameters()), r"leaves out 2 parameters.*2\.weight.*requires_grad=False"),
        (lambda net: "adam", r"optimizer is a str"),
    ],
)
def test_an_optimizer_of_something_else_is_refused(trainer_for: Any, first: Any, said: str) -> None:
    net, (x, y) = network(), batches([4])[0]
    with pytest.raises(ConfigError, match=said):
        trainer_for(net).train_step(x, y, CE, first(net))


def test_what_is_frozen_may_be_left_out(trainer_for: Any) -> None:
    net, expected = network(), network()
    for model in (net, expected):
        model[0].requires_grad_(False)
    trainer = trainer_for(net)
    for x, y in batches(SIZES):
        trainer.train_step(x, y, CE, torch.optim.Adam(net[2].parameters(), lr=0.01))
    plain_loop(expected, batches(SIZES), CE, torch.optim.Adam(expected[2].parameters(), lr=0.01))
    assert_same(net, expected)


def test_every_third_step_updates_with_the_mean_gradient(trainer_for: Any) -> None:
    net, expected, data = network(), network(), batches((13, 7, 4, 5, 6, 2, 13))
    trainer = trainer_for(net, gradient_accumulation_steps=3)
    losses = []
    for number, (x, y) in enumerate(data, 1):
        before = net[0].weight.clone()
        losses.append(trainer.train_step(x, y, CE, adam(net)))
        assert torch.equal(net[0].weight, before) == (number % 3 != 0)
        trainer.evaluate_step(x, y, CE)  # between gradients: it leaves them alone
    assert losses == close(plain_loop(expected, data, CE, accumulate=3))
    assert_same(net, expected)
    assert trainer.steps == 2


@pytest.mark.parametrize(
    "criterion",
    [
        nn.CrossEntropyLoss(weight=torch.tensor([0.2, 3.0, 1.0]), ignore_index=1, label_smoothing=0.1),
        nn.CrossEntropyLoss(reduction="sum"),
        functools.partial(F.cross_entropy, ignore_index=0),
        lambda out, y: F.cross_entropy(out, y).sqrt(),  # in one process there is nothing to put together
    ],
)
@pytest.mark.parametrize("parts", [1, 3])
def test_criteria_with_a_mean_of_their_own(trainer_for: Any, criterion: Any, parts: int) -> None:
    config = Config.from_dict({"training": {"precision": "fp32", "gradient_accumulation": parts}})
    net, expected, data = network(), network(), batches((13, 12, 13))
    trainer = trainer_for(net, config=config)
    if parts > 1 and getattr(criterion, "__name__", "") == "<lambda>":
        with pytest.raises(ModelError, match="neither the mean nor the sum"):
            trainer.train_step(*data[0], criterion, adam(net))
        return
    losses = [trainer.train_step(x, y, criterion, adam(net)) for x, y in data]
    assert losses == close(plain_loop(expected, data, criterion))
    assert_same(net, expected)


def test_evaluate_step_gives_loss_and_outputs_and_leaves_modes_alone(trainer_for: Any) -> None:
    net = nn.Sequential(network(), nn.Dropout(0.5), nn.BatchNorm1d(CLASSES))
    net[2].eval()  # frozen by the user
    trainer, (x, y) = trainer_for(net), batches([9])[0]
    torch.manual_seed(1)
    result = trainer.evaluate_step(x, y, CE)  # before any optimizer is known
    trainer.train_step(x, y, CE, adam(net))
    assert [m.training for m in net] == [True, True, False]
    drawn = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(3))  # dropout draws from a generator of its own
    fresh = nn.Sequential(network(), nn.Dropout(0.5), nn.BatchNorm1d(CLASSES)).eval()
    torch.testing.assert_close(result.outputs, fresh(x))
    assert result.loss == pytest.approx(CE(fresh(x), y).item(), rel=1e-6)
    assert not result.outputs.requires_grad


class Two(nn.Module):
    """Takes its inputs by name or place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        out: Tensor = self.inner(x)
        return out if scale is None else out * scale[:, None]


class Packed(Two):
    """Takes one dict."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(batch["x"], batch["scale"])


@pytest.mark.parametrize(
    ("kind", "packed"),
    [
        (Two, lambda x, s: {"x": x, "scale": s}),
        (Two, lambda x, s: (x, s)),
        (Two, lambda x, s: [x, s]),
        (Packed, lambda x, s: {"x": x, "scale": s}),
    ],
)
def test_inputs_of_several_tensors(trainer_for: Any, kind: type[nn.Module], packed: Any) -> None:
    net, (x, y) = kind(), batches([6])[0]
    scale = torch.linspace(0.5, 2, 6)
    loss = trainer_for(net).train_step(packed(x, scale), y, CE, adam(net))
    assert loss == pytest.approx(CE(network()(x) * scale[:, None], y).item(), rel=1e-6)


def test_data_reaches_the_model_as_it_is(trainer_for: Any) -> None:
    class Pixels(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            assert x.dtype == torch.uint8
            return super().forward(x.flatten(1).float() / 255)  # type: ignore[no-any-return]

    net, images = Pixels(nn.Linear(12, CLASSES)), torch.arange(36, dtype=torch.uint8).reshape(3, 3, 2, 2)
    wanted = CE(net(images), torch.arange(3)).item()
    assert trainer_for(net).train_step(images, torch.arange(3), CE, adam(net)) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("when", ["before", "after"])
def test_save_and_load_go_on_as_if_nothing_had_been(trainer_for: Any, tmp_path: Path, when: str) -> None:
    data, expected = batches((13, 7, 13, 5, 13, 1)), network()
    plain_loop(expected, data, CE)
    first = network()
    trainer = trainer_for(first)
    for x, y in data[:3]:
        trainer.train_step(x, y, CE, adam(first))
    path = trainer.save(tmp_path / "saved")
    assert path == tmp_path / "saved" / "step-0000000003"
    second = network(seed=9)
    resumed = trainer_for(second)
    if when == "after":  # the optimizer has a state that must go
        resumed.train_step(*data[5], CE, adam(second))
    assert resumed.load(tmp_path / "saved") == path
    assert resumed.steps == 3
    assert_same(second, first)
    for x, y in data[3:]:
        resumed.train_step(x, y, CE, adam(second))
    assert_same(second, expected)


def test_what_was_loaded_can_be_saved_before_the_first_step(trainer_for: Any, tmp_path: Path) -> None:
    data, expected = batches((13, 7)), network()
    plain_loop(expected, data, CE)
    nets = [network(), network(1), network(2)]
    first, second, third = (trainer_for(net) for net in nets)
    first.train_step(*data[0], CE, adam(nets[0]))
    second.load(first.save(tmp_path / "a"))
    third.load(second.save(tmp_path / "b"))
    third.train_step(*data[1], CE, adam(nets[2]))
    assert_same(nets[2], expected)


def test_saving_over_a_later_training_and_loading_nothing_are_refused(trainer_for: Any, tmp_path: Path) -> None:
    net, (x, y) = network(), batches([4])[0]
    trainer = trainer_for(net)
    trainer.train_step(x, y, CE, adam(net))
    trainer.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"checkpoint of step 1, and this training is at step 0"):
        trainer_for(network()).save(tmp_path)
    with pytest.raises(CheckpointError, match=r"no usable checkpoint"):
        trainer.load(tmp_path / "empty")
    sgd = trainer_for(other := network())
    sgd.load(tmp_path)
    with pytest.raises(CheckpointError, match=r"state of Adam, but the optimizer here is SGD"):
        sgd.train_step(x, y, CE, torch.optim.SGD(other.parameters(), 0.1))


@pytest.mark.parametrize(
    ("inputs", "targets", "said"),
    [
        (torch.zeros(4, FEATURES), torch.zeros(3).long(), "4 rows of inputs, but 3 of targets"),
        (torch.zeros(0, FEATURES), torch.zeros(0).long(), "batch is empty"),
        ([[1.0, 2.0]], torch.zeros(1), "no tensor with rows"),
    ],
)
def test_batches_that_are_none_are_refused(trainer_for: Any, inputs: Any, targets: Any, said: str) -> None:
    net = network()
    with pytest.raises(DataError, match=said):
        trainer_for(net).train_step(inputs, targets, CE, adam(net))


def test_a_loss_of_many_numbers_is_refused(trainer_for: Any) -> None:
    net, (x, y) = network(), batches([4])[0]
    with pytest.raises(ModelError, match=r"CrossEntropyLoss gave a tensor of shape \(4,\)"):
        trainer_for(net).train_step(x, y, nn.CrossEntropyLoss(reduction="none"), adam(net))


def test_steps_that_are_not_finite_change_nothing_and_end_the_training_in_the_end(trainer_for: Any) -> None:
    net, (x, y) = network(), batches([4])[0]
    trainer = trainer_for(net)
    trainer.train_step(x, y, CE, adam(net))
    before = network()
    before.load_state_dict(net.state_dict())
    assert trainer.train_step(x * float("nan"), y, CE, adam(net)) != 0
    assert_same(net, before, 0)
    for _ in range(3):
        trainer.train_step(x * float("nan"), y, CE, adam(net))
    with pytest.raises(TrainingDivergedError, match="5 steps in a row"):
        trainer.train_step(x * float("nan"), y, CE, adam(net))
    assert_same(net, before, 0)


def test_a_strategy_of_one_gpu_is_not_given_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)  # set for GPUs: put back after
    with pytest.raises(ConfigError, match=r"strategy=single uses one GPU in each process, but num_gpus=2"):
        create_distributed_trainer(network(), num_gpus=2, strategy="single")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0"),
        ({"reduction": "median"}, "'median' is none of auto, mean, sum"),
        ({"strategy": "dpp"}, "did you mean"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        create_distributed_trainer(network(), num_gpus=0, **settings)
    with pytest.raises(ConfigError, match="num_gpus=-1"):
        create_distributed_trainer(network(), num_gpus=-1)
