"""Batch norm over the samples of all ranks, on any device.

torch's SyncBatchNorm needs a GPU. This one is a few lines of differentiable sums, weighted by the rows of each rank, so
that a step over ranks is that of one device to rounding, uneven last batches included.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce


def synchronise_batchnorm(model: nn.Module) -> None:
    """Make every batch norm of the model look at all ranks. Parameters, buffers and names stay as they are."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.forward = _forward.__get__(module)  # type: ignore[method-assign]


def _forward(self: nn.modules.batchnorm._BatchNorm, inputs: Tensor) -> Tensor:
    if not self.training or not dist.is_initialized():
        return nn.modules.batchnorm._BatchNorm.forward(self, inputs)
    self._check_input_dim(inputs)
    other = [d for d in range(inputs.ndim) if d != 1]
    wide = inputs.float() if inputs.dtype in (torch.float16, torch.bfloat16) else inputs
    count = torch.full((1,), float(inputs.numel() // inputs.shape[1]), device=inputs.device, dtype=wide.dtype)
    # Two rounds, not the sum of squares: that loses digits where the mean is large.
    total = all_reduce(torch.cat([wide.sum(other), count]))
    count = total[-1].detach()
    mean = total[:-1] / count
    shape = [1, -1] + [1] * (inputs.ndim - 2)
    centred = wide - mean.view(shape)
    variance = all_reduce((centred * centred).sum(other)) / count
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
