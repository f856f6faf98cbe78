"""What tests of a loop of one's own share, alone and in ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import nn

from distributed_training import create_distributed_trainer
from distributed_training.training.stepwise import DistributedTrainer


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
