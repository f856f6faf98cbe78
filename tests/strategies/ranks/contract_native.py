"""The contract of a strategy, run by every rank of a job: see test_ranks.py for who starts it.

STRATEGY names the strategy under test, OPTIONS (JSON) the rest of its config.
"""

from __future__ import annotations

import json
import os

import pytest
import torch
from tests.contract.strategy import Factory, StrategyContract

from distributed_training.config import StrategyConfig
from distributed_training.runtime.world import read_world
from distributed_training.strategies import Place, make_strategy

DEVICE = torch.device(os.environ.get("DEVICE", "cpu"))
CONFIG = StrategyConfig(name=os.environ["STRATEGY"], **json.loads(os.environ.get("OPTIONS", "{}")))


class TestRanks(StrategyContract):
    @pytest.fixture
    def strategy_factory(self) -> Factory:
        return lambda: make_strategy(Place(DEVICE, read_world(), CONFIG, deadline=120))
