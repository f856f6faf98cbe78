"""DataParallel on real GPUs: the contract on whatever there is, and a batch cut over two of them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.contract.strategy import BATCH, FEATURES, Factory, StrategyContract, batch, make_model
from torch import Tensor, nn

from distributed_training.config import StrategyConfig
from distributed_training.runtime.errors import ConfigError
from distributed_training.strategies import Place, StepSettings, make_strategy
from distributed_training.strategies.dp import Replicas

CUDA = torch.device("cuda", 0)
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


class TestDataParallel(StrategyContract):
    @pytest.fixture
    def strategy_factory(self) -> Factory:
        return lambda: make_strategy(Place(CUDA, config=StrategyConfig(name="dp")))


class WithLoss(nn.Module):
    """A model of the second form: a dict with its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.inner(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.parametrize("devices", [[0], pytest.param([0, 1], marks=needs_two)])
def test_a_model_with_its_own_loss_gives_that_of_the_batch(devices: list[int]) -> None:
    model, expected = WithLoss().to(CUDA), WithLoss().to(CUDA)
    x, labels = (tensor.to(CUDA) for tensor in batch(0))
    output = Replicas(model, device_ids=devices)(x=x, labels=labels)
    wanted = expected(x=x, labels=labels)
    output["loss"].backward()
    wanted["loss"].backward()
    assert output["logits"].shape[0] == BATCH
    torch.testing.assert_close(output["loss"], wanted["loss"])
    for p, q in zip(model.parameters(), expected.parameters()):
        torch.testing.assert_close(p.grad, q.grad)


@needs_two
def test_several_gpus_share_a_batch_and_cannot_compile() -> None:
    strategy = make_strategy(Place(CUDA, config=StrategyConfig(name="dp")))
    forward = strategy.setup(make_model(), None, StepSettings())
    assert isinstance(forward, Replicas)
    assert forward(torch.zeros(BATCH, FEATURES, device=CUDA)).shape[0] == BATCH
    assert all(not name.startswith("module.") for name in strategy.state()["model"])
    with pytest.raises(ConfigError, match=r"training\.compile=true"):
        strategy.setup(make_model(), None, StepSettings(compile=True))
    strategy.teardown()
