"""The contract under DeepSpeed, run by every rank of a job: see test_deepspeed.py for who starts it.

OPTIONS (JSON) is the strategy's config beside its name.
"""

from __future__ import annotations

import copy
import json
import os
from typing import Any

import pytest
import torch
from tests.contract.strategy import Factory, StrategyContract, batch, same, train_step, was_skipped

from distributed_training.config import StrategyConfig
from distributed_training.runtime.world import read_world
from distributed_training.strategies import Place, make_strategy

CONFIG = StrategyConfig(name="deepspeed", **json.loads(os.environ.get("OPTIONS", "{}")))


class TestDeepSpeed(StrategyContract):
    @pytest.fixture
    def strategy_factory(self) -> Factory:
        return lambda: make_strategy(Place(torch.device("cpu"), read_world(), CONFIG, deadline=120))

    def test_the_guard_can_be_off(self, build: Any) -> None:
        """Except where DeepSpeed needs the norm of the gradients in every step: then it skips by it, asked or not."""
        if CONFIG.zero_stage != 3 and not CONFIG.cpu_offload:
            super().test_the_guard_can_be_off(build)
            return
        strategy, forward = build(nonfinite="off")
        before = copy.deepcopy(strategy.state())
        assert was_skipped(train_step(strategy, forward, batch(0), factor=float("nan")))
        assert same(strategy.state(), before)
