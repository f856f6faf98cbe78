"""Evaluation uses each sample once, and leaves everything as it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.training.examples import CLASSES, FEATURES, config, data, loader, model, trainer
from torch import Tensor, nn
from torchmetrics import MeanAbsoluteError
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from distributed_training.data.base import Batch, BatchSource
from distributed_training.runtime.errors import DataError, ModelError
from distributed_training.training import Trainer


def test_the_loss_is_the_mean_over_samples_not_over_batches() -> None:
    net = model()
    x, y = data()
    for size in (1, 7, 8, 44):
        values = trainer(net).evaluate(loader(batch_size=size))
        with torch.no_grad():
            expected = F.cross_entropy(net(x), y).item()
            accuracy = (net(x).argmax(1) == y).float().mean().item()
        assert values == {"loss": pytest.approx(expected, abs=1e-6), "accuracy": pytest.approx(accuracy)}


def test_shuffling_and_dropping_are_for_training_only() -> None:
    assert trainer().evaluate(loader(drop_last=True)) == pytest.approx(trainer().evaluate(loader(shuffle=False)))


def test_dropout_and_batch_norm_are_in_evaluation_mode_and_back_afterwards() -> None:
    net = nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Dropout(0.5), nn.Linear(FEATURES, CLASSES))
    own = trainer(net)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    for mode in (True, False):
        net.train(mode)
        assert own.evaluate(loader()) == own.evaluate(loader())
        own.predict(loader())
        assert net.training is mode
        assert net[1].training is mode
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())


def test_the_mode_comes_back_after_an_error_too() -> None:
    class Breaks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("broken")

    net = Breaks(FEATURES, CLASSES)
    with pytest.raises(RuntimeError, match="broken"):
        trainer(net).evaluate(loader())
    assert net.training
    assert torch.is_grad_enabled()


def test_metrics_of_the_trainer_or_of_the_call() -> None:
    net = model()
    own = Trainer(net, config=config(), metrics={"f1": MulticlassF1Score(CLASSES)}, run_dir=False)
    assert set(own.evaluate(loader())) == {"loss", "f1"}
    top2 = {"top2": MulticlassAccuracy(CLASSES, top_k=2)}
    first = own.evaluate(loader(), metrics=top2)
    assert set(first) == {"loss", "top2"}
    assert own.evaluate(loader(), metrics=top2) == first, "metrics start empty each time"
    assert set(own.evaluate(loader(), metrics={})) == {"loss"}


def test_regression_has_a_loss_and_the_metrics_asked_for() -> None:
    x, _ = data()
    y = x.sum(1)
    net = nn.Linear(FEATURES, 1)
    assert set(trainer(net).evaluate((x, y))) == {"loss"}
    values = trainer(net).evaluate((x, y[:, None]), metrics={"mae": MeanAbsoluteError()})
    with torch.no_grad():
        assert values["mae"] == pytest.approx((net(x)[:, 0] - y).abs().mean().item(), rel=1e-5)
        assert values["loss"] == pytest.approx((net(x)[:, 0] - y).square().mean().item(), rel=1e-5)


def test_a_metric_of_several_numbers_gives_each_a_name() -> None:
    from distributed_training.training.evaluation import _numbers

    assert _numbers("f1", torch.tensor(0.5)) == {"f1": 0.5}
    assert _numbers("f1", torch.tensor([0.25, 0.75])) == {"f1_0": 0.25, "f1_1": 0.75}
    assert _numbers("all", {"f1": torch.tensor(0.5), "auc": 1.0}) == {"all_f1": 0.5, "all_auc": 1.0}


def test_something_that_is_no_metric_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"metric 'accuracy' is a function; give torchmetrics"):
        trainer().evaluate(loader(), metrics={"accuracy": lambda: 1})


class Nothing(BatchSource):
    steps_per_epoch = 0

    def batches(self, epoch: int, start: int = 0) -> Iterator[tuple[int, Batch]]:
        return iter(())


def test_no_data_is_an_error() -> None:
    with pytest.raises(DataError, match="empty"):
        trainer().evaluate(Nothing())
    with pytest.raises(DataError, match="empty"):
        trainer().evaluate((torch.zeros(0, FEATURES), torch.zeros(0).long()))
    assert trainer().predict(Nothing()) == []


def test_predictions_come_in_the_order_of_the_dataset() -> None:
    net, (x, _) = model(), data()
    with torch.no_grad():
        expected = net(x)
    own = trainer(net, training__batch_size=5)
    for given in (loader(batch_size=7), loader(drop_last=True, num_workers=2), (x,), {"input": x}, data()):
        torch.testing.assert_close(own.predict(given), expected)


def test_predictions_are_fp32_on_the_cpu_whatever_the_precision() -> None:
    output = trainer(training__precision="bf16").predict(loader())
    assert (output.dtype, output.requires_grad, len(output)) == (torch.float32, False, 44)


def test_outputs_that_are_no_tensors_come_as_a_list_of_batches() -> None:
    class Pair(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return {"a": super().forward(x), "b": x.argmax(1)}

    outputs = trainer(Pair(FEATURES, 2)).predict(loader(batch_size=30))
    assert [sorted(batch) for batch in outputs] == [["a", "b"], ["a", "b"]]
    assert [len(batch["b"]) for batch in outputs] == [30, 14]


def test_a_batch_source_of_the_user_is_not_closed() -> None:
    class Closes(Nothing):
        closed = False

        def batches(self, epoch: int, start: int = 0) -> Iterator[tuple[int, Batch]]:
            import numpy as np

            yield 0, Batch(np.arange(44), data())

        def close(self) -> None:
            self.closed = True

    source = Closes()
    trainer().evaluate(source)
    trainer().predict(source)
    assert not source.closed
