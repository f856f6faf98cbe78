"""Batch norm over the samples of all ranks, on any device and under any strategy.

torch's SyncBatchNorm needs a GPU. This one is a few lines of differentiable sums, weighted by the rows of each rank, so
that a step over ranks is that of one device to rounding, uneven last batches included.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from distributed_training.strategies.base import Strategy


class _Sum(torch.autograd.Function):
    """A sum over ranks. Every rank's output depends on every rank's input, so gradients are summed the same way."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, strategy: Strategy) -> Tensor:
        ctx.strategy = strategy
        return strategy.reduce(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.strategy.reduce(gradient), None


def synchronise_batchnorm(model: nn.Module, strategy: Strategy) -> None:
    """Make every batch norm of the model look at all ranks. Parameters, buffers and names stay as they are."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.forward = functools.partial(_forward, module, strategy)  # type: ignore[method-assign]


def _forward(self: nn.modules.batchnorm._BatchNorm, strategy: Strategy, inputs: Tensor) -> Tensor:
    if not self.training or strategy.world_size == 1:
        return nn.modules.batchnorm._BatchNorm.forward(self, inputs)
    self._check_input_dim(inputs)
    other = [d for d in range(inputs.ndim) if d != 1]
    wide = inputs.float() if inputs.dtype in (torch.float16, torch.bfloat16) else inputs
    weight = 1.0 if strategy.counts else 0.0
    own = torch.full((1,), weight * (inputs.numel() // inputs.shape[1]), device=inputs.device, dtype=wide.dtype)
    # Two rounds, not the sum of squares: that loses digits where the mean is large.
    total: Tensor = _Sum.apply(torch.cat([wide.sum(other) * weight, own]), strategy)
    count = total[-1].detach()
    mean = total[:-1] / count
    shape = [1, -1] + [1] * (inputs.ndim - 2)
    centred = wide - mean.view(shape)
    variance: Tensor = _Sum.apply((centred * centred).sum(other) * weight, strategy) / count
    result = centred * torch.rsqrt(variance + self.eps).view(shape)
    if self.track_running_stats:
        with torch.no_grad():
            self.num_batches_tracked.add_(1)  # type: ignore
            factor = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)  # type: ignore
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)  # type: ignore
            unbiased = variance * (count / (count - 1).clamp(min=1))
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)  # type: ignore
    if self.affine:
        result = result * self.weight.view(shape) + self.bias.view(shape)
    return result.to(inputs.dtype)
