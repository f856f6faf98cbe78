"""The sources that a trainer makes of users' data keep the contract of the loop."""

from __future__ import annotations

from typing import Any

import pytest
from tests.contract.batch_source import BatchSourceContract, Factory
from tests.training.examples import NoisyImages, data, loader, trainer
from torch.utils.data import DataLoader

GIVEN: dict[str, Any] = {
    "dataloader": lambda: loader(),
    "arrays": lambda: data(),
    "random dataset": lambda: DataLoader(NoisyImages(), batch_size=4, shuffle=True),
    "workers": lambda: DataLoader(NoisyImages(), batch_size=4, shuffle=True, num_workers=2),
    "drop last": lambda: loader(drop_last=True),
    "list of batches": lambda: list(loader(shuffle=False)),
}


class TestTrainingSources(BatchSourceContract):
    @pytest.fixture(params=GIVEN)
    def source_factory(self, request: pytest.FixtureRequest) -> Factory:
        own = trainer(training__batch_size=8)
        return lambda: own._source(GIVEN[request.param](), training=True)


class TestEvaluationSources(BatchSourceContract):
    @pytest.fixture(params=GIVEN)
    def source_factory(self, request: pytest.FixtureRequest) -> Factory:
        own = trainer(training__batch_size=8)
        return lambda: own._source(GIVEN[request.param](), training=False)
