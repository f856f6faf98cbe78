"""DataParallel: the contract in one process, and replicas' outputs put together by their rows."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from tests.contract.strategy import BATCH, Factory, StrategyContract, batch, make_model
from torch import Tensor

from distributed_training.config import StrategyConfig
from distributed_training.runtime.errors import ConfigError
from distributed_training.runtime.world import World
from distributed_training.strategies import Place, make_strategy
from distributed_training.strategies.auto import choose_strategy
from distributed_training.strategies.dp import DataParallel, put_together

CPU = torch.device("cpu")
CONFIG = StrategyConfig(name="dp")


class TestDataParallel(StrategyContract):
    @pytest.fixture
    def strategy_factory(self) -> Factory:
        return lambda: make_strategy(Place(CPU, config=CONFIG))


def test_several_processes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"one process for all GPUs, but torchrun started 2; use strategy=ddp"):
        DataParallel(Place(CPU, World(0, 2, launcher="torchrun"), CONFIG))


def test_auto_takes_it_for_several_gpus_in_one_process() -> None:
    assert choose_strategy(Place(torch.device("cuda", 0), gpus=(0, 1))) == "dp"


@dataclass
class Output:
    loss: Tensor
    logits: Tensor
    attentions: None = None


class Named(NamedTuple):
    loss: Tensor
    logits: Tensor


@pytest.mark.parametrize("replicas", [1, 2, 4, 5])
@pytest.mark.parametrize(
    "form",
    [
        lambda loss, logits: {"loss": loss, "logits": logits},
        lambda loss, logits: OrderedDict(loss=loss, logits=logits),
        Output,
        Named,
    ],
)
def test_a_loss_of_each_replica_comes_to_the_loss_and_gradient_of_the_batch(form: Any, replicas: int) -> None:
    model, (x, y) = make_model(), batch(0)
    parts = list(zip(x.chunk(replicas), y.chunk(replicas)))  # as DataParallel cuts them: uneven
    logits = [model(inputs) for inputs, _ in parts]
    outputs = [form(F.cross_entropy(o, targets), o) for o, (_, targets) in zip(logits, parts)]
    whole = put_together(outputs, [len(inputs) for inputs, _ in parts], CPU)
    assert type(whole) is type(outputs[0])
    loss, rows = (whole["loss"], whole["logits"]) if isinstance(whole, dict) else (whole.loss, whole.logits)
    assert rows.shape == (BATCH, 3)
    assert loss.ndim == 0
    loss.backward()
    expected = make_model()
    wanted = F.cross_entropy(expected(x), y)
    wanted.backward()
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-6)
    for p, q in zip(model.parameters(), expected.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=1e-6)


def test_nested_outputs_keep_their_shape() -> None:
    whole = put_together([[(torch.ones(2),), None, 3], [(torch.zeros(1),), None, 3]], [2, 1], CPU)
    assert whole[0][0].tolist() == [1, 1, 0]
    assert whole[1:] == [None, 3]
