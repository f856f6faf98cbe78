"""One step: errors name the sample, and its randomness is a function of (seed, epoch, step)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.training.examples import FEATURES, Losses, assert_same_weights, data, loader, model, trainer
from torch import nn

from distributed_training.data.base import Batch
from distributed_training.runtime.errors import DataError
from distributed_training.training.step import check_labels


@pytest.mark.parametrize("label", [3, 17, -1])
@pytest.mark.parametrize("parts", [1, 3])
def test_a_label_out_of_range_names_its_sample(label: int, parts: int) -> None:
    x, y = data()
    y[23] = label
    own = trainer(training__gradient_accumulation=parts, training__batch_size=8)
    with pytest.raises(DataError, match=rf"sample 23: label {label} is out of range.*set model\.num_classes"):
        own.train((x, y), epochs=1)


def test_labels_of_a_dict_batch_are_named_without_a_sample() -> None:
    class Named(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x)

    x, y = data()
    y[3] = 9
    with pytest.raises(DataError, match="label 9 is out of range"):
        trainer(Named(FEATURES, 3), training__batch_size=8).train({"x": x, "labels": y}, epochs=1)


def test_an_index_error_of_the_model_is_left_as_it_is() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.table(x)

    with pytest.raises(IndexError, match="index out of range"):
        trainer(Looks(), training__batch_size=4).train((torch.arange(8), torch.zeros(8).long()), epochs=1)


def batch(targets: Any) -> Batch:
    return Batch(np.array([10, 11, 12]), (torch.zeros(3, 2), targets))


@pytest.mark.parametrize(("wrong", "sample"), [([0, 5, 1], 11), ([-1, 0, 1], 10), ([0, 1, 3], 12)])
def test_check_labels_names_the_first_wrong_one(wrong: list[int], sample: int) -> None:
    with pytest.raises(DataError, match=rf"sample {sample} has label .* classes 0 to 2"):
        check_labels(batch(torch.tensor(wrong)), 3)


@pytest.mark.parametrize(
    "targets", [torch.tensor([0, 1, 2]), torch.tensor([0, -100, 2]), torch.rand(3), torch.full((3, 2), 9), None]
)
def test_check_labels_lets_everything_else_pass(targets: Any) -> None:
    check_labels(batch(targets), 3)
    check_labels(Batch(np.arange(3), {"x": targets}), 3)


@pytest.mark.parametrize("parts", [2, 3, 8])
@pytest.mark.parametrize("batch_size", [8, 7, 44])
def test_accumulation_does_not_change_the_training(parts: int, batch_size: int) -> None:
    nets, losses = [model(), model()], [Losses(), Losses()]
    for net, seen, number in zip(nets, losses, (1, parts)):
        settings = {"training__gradient_accumulation": number, "training__batch_size": max(batch_size, number)}
        trainer(net, seen, training__optimizer="sgd", **settings).train(loader(batch_size=batch_size), epochs=2)
    assert losses[0].seen == pytest.approx(losses[1].seen, abs=1e-5)
    for a, b in zip(nets[0].parameters(), nets[1].parameters()):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_dropout_depends_on_the_seed_and_not_on_what_was_drawn_before() -> None:
    def train(seed: int, before: int) -> nn.Module:
        net = model(dropout=0.5)
        torch.manual_seed(before)
        trainer(net, training__seed=seed, training__batch_size=8).train((*data(),), epochs=1)
        return net

    assert_same_weights(train(1, before=0), train(1, before=99))
    first, other = train(1, before=0), train(2, before=0)
    assert not torch.equal(first[0].weight, other[0].weight)
