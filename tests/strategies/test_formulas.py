"""Memory and traffic by the book."""

from __future__ import annotations

import pytest

from distributed_training.config import StrategyConfig
from distributed_training.strategies import formulas


@pytest.mark.parametrize(
    ("settings", "memory", "wire"),
    [
        ({"name": "single"}, 16, 0.0),
        ({"name": "ddp"}, 16, 6.0),
        ({"name": "ddp", "compression": "fp16"}, 16, 3.0),
        ({"name": "zero1"}, 10, 9.0),
        ({"name": "zero2"}, 7, 6.0),
        ({"name": "zero3"}, 4, 9.0),
        ({"name": "deepspeed"}, 7, 6.0),
        ({"name": "deepspeed", "zero_stage": 3}, 4, 9.0),
        ({"name": "accelerate"}, 16, 6.0),
        ({"name": "accelerate", "plugin": "fsdp"}, 4, 9.0),
    ],
)
def test_the_formulas_are_those_of_the_documentation(settings: dict, memory: float, wire: float) -> None:
    strategy, parameters, ranks = StrategyConfig(**settings), 1000, 4
    alone = strategy.name == "single"
    assert formulas.state_bytes(strategy, 4 * parameters, 8 * parameters, 1 if alone else ranks) == memory * parameters
    assert formulas.wire_bytes(strategy, 4 * parameters, ranks) == wire * parameters
