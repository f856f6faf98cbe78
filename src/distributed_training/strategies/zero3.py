"""ZeRO stage 3: weights, gradients and optimizer state are divided. What torch calls fully sharded."""

from __future__ import annotations

from distributed_training.strategies.fsdp import FSDP


class Zero3(FSDP):
    """Weights are gathered module by module, in the forward and again in the backward pass."""

    name = "zero3"
