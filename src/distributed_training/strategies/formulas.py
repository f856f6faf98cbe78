"""Memory and traffic of a strategy by the book: docs/strategies.md, Memory and traffic.

`bench strategies` shows them beside what it measured, `dtrain plan` takes the bytes that travel from here.
"""

from __future__ import annotations

from distributed_training.config.schema import StrategyConfig

_WHOLE, _OPTIMIZER, _GRADIENTS, _ALL = 0, 1, 2, 3  # what is divided among the ranks, as the stages of ZeRO
_SMALLER = {"fp16": 0.5, "bf16": 0.5, "int8": 0.25}  # PowerSGD depends on the shapes, and is not in the formula
_STAGES = {"zero1": _OPTIMIZER, "zero2": _GRADIENTS, "zero3": _ALL, "fsdp": _ALL}

PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""Times that a ring takes the bytes of a tensor round."""
OPERATIONS = {
    _WHOLE: ("all_reduce",),
    _OPTIMIZER: ("all_reduce", "all_gather"),
    _GRADIENTS: ("all_gather", "reduce_scatter"),
    _ALL: ("all_gather", "all_gather", "reduce_scatter"),
}
"""By stage, what the ranks do in a step with a tensor of the size of the weights.

Stage 1 sends the new weights too; stage 2 gathers them in place of half the all-reduce; stage 3 gathers them twice.
"""


def stage_of(strategy: StrategyConfig) -> int:
    """The stage of ZeRO that a strategy is; 0 where every rank has everything."""
    if strategy.name == "deepspeed" or strategy.plugin == "deepspeed":
        return _GRADIENTS if strategy.zero_stage is None else strategy.zero_stage
    return _ALL if strategy.plugin == "fsdp" else _STAGES.get(strategy.name, _WHOLE)


def state_bytes(strategy: StrategyConfig, weights: int, optimizer: int, ranks: int) -> float:
    """Weights, gradients and optimizer state of one rank. Activations and buffers come on top.

    Args:
        weights: bytes of all parameters.
        optimizer: bytes that the optimizer keeps of all of them.
    """
    stage = stage_of(strategy)
    parts = [(weights, _ALL), (weights, _GRADIENTS), (optimizer, _OPTIMIZER)]
    return sum(size / ranks if stage >= divided_from else size for size, divided_from in parts)


def wire_bytes(strategy: StrategyConfig, weights: int, ranks: int) -> float:
    """Bytes that one rank sends in a step, by rings."""
    if strategy.name in ("single", "dp"):
        return 0.0
    return step_bytes(stage_of(strategy), weights, ranks) * _SMALLER.get(strategy.compression, 1.0)


def step_bytes(stage: int, weights: float, ranks: int) -> float:
    """Bytes that one rank sends in a step of a stage of ZeRO."""
    return sum(bytes_sent(operation, weights, ranks) for operation in OPERATIONS[stage])


def bytes_sent(operation: str, size: float, ranks: int) -> float:
    """Bytes that one rank sends in one operation on a tensor of `size` bytes: (N-1)/N of it for each time round.

    In a broadcast every rank but the last passes on all of it.
    """
    if operation == "broadcast":
        return size if ranks > 1 else 0.0
    return PASSES[operation] * (ranks - 1) / ranks * size
