"""What memory and traffic should be by the book, beside what is measured (docs/strategies.md, Memory and traffic)."""

from __future__ import annotations

from distributed_training.config.schema import StrategyConfig

_WHOLE, _OPTIMIZER, _GRADIENTS, _ALL = 0, 1, 2, 3  # what is divided among the ranks, as the stages of ZeRO
_SMALLER = {"fp16": 0.5, "bf16": 0.5, "int8": 0.25}  # PowerSGD depends on the shapes, and is not in the formula
_STAGES = {"zero1": _OPTIMIZER, "zero2": _GRADIENTS, "zero3": _ALL, "fsdp": _ALL}


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
    """Bytes that one rank sends in a step, by rings.

    An all-reduce is two transfers of (N-1)/N of the gradients. Stage 1 sends the new weights too; stage 2 gathers them
    in place of half the all-reduce; stage 3 gathers them twice. DeepSpeed's stage 1 reduces to owners and gathers.
    """
    if ranks == 1 or strategy.name in ("single", "dp"):
        return 0.0
    stage = stage_of(strategy)
    transfers = {_WHOLE: 2, _OPTIMIZER: 3, _GRADIENTS: 2, _ALL: 3}[stage]
    return transfers * weights * (ranks - 1) / ranks * _SMALLER.get(strategy.compression, 1.0)
