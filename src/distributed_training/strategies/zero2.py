"""ZeRO stage 2: gradients and optimizer state are divided; weights are whole while a step computes with them."""

from __future__ import annotations

from distributed_training.strategies.fsdp import FSDP


class Zero2(FSDP):
    """Weights are gathered once a step, before the forward pass, and given up after the backward pass."""

    name = "zero2"
    keep_gathered = True
