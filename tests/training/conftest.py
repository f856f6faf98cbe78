"""What tests of trainings share, alone and in ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.forked_ranks import COMMON, RankServer
from torch import nn

from distributed_training import create_distributed_trainer
from distributed_training.training.stepwise import DistributedTrainer

METRICS = ("torchmetrics.classification", "sklearn.metrics")


@pytest.fixture(scope="session")
def rank_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankServer]:
    """Starts ranks that have imported libraries of metrics, too: that takes longer than all that they do."""
    server = RankServer(tmp_path_factory.mktemp("ranks"), [*COMMON, *METRICS])
    yield server
    server.close()


@pytest.fixture
def trainer_for() -> Iterator[Callable[..., DistributedTrainer]]:
    """Make trainers on the CPU; all are closed at the end."""
    made = []

    def make(net: nn.Module, **settings: Any) -> DistributedTrainer:
        made.append(create_distributed_trainer(net, num_gpus=0, **settings))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()
        trainer.close()  # twice is once
