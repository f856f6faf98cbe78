"""How far two sets of weights are apart, as one number a tensor that means the same for large and small ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


def typical_size(weights: Mapping[str, Tensor], names: Iterable[str]) -> float:
    """The root mean square of all the weights named."""
    chosen = [weights[name] for name in names if name in weights and weights[name].is_floating_point()]
    count = sum(tensor.numel() for tensor in chosen)
    squares = sum(float(tensor.double().square().sum()) for tensor in chosen)
    return math.sqrt(squares / count) if count and math.isfinite(squares) else 0.0


def differences(reference: Mapping[str, Tensor], other: Mapping[str, Tensor], typical: float) -> dict[str, float]:
    """For each tensor of either side, how far `other` is from `reference`; infinite where they cannot be compared."""
    return {
        name: _difference(reference[name], other[name], typical)
        if name in reference and name in other and reference[name].shape == other[name].shape
        else math.inf
        for name in {**other, **reference}  # in the order of the model
    }


def relative(reference: float, other: float, size: float) -> float:
    """The difference of two numbers as a share of `size`. Two that are not finite in the same way do not differ."""
    if reference == other or (math.isnan(reference) and math.isnan(other)):
        return 0.0
    difference = abs(reference - other)
    return difference / size if size and math.isfinite(difference) else math.inf


def _difference(reference: Tensor, other: Tensor, typical: float) -> float:
    """Root mean square of the difference, as a share of that of the tensor or of the model, whichever is larger.

    Not the largest single difference: Adam divides a gradient by its own size, so where one happens to be near zero its
    rounding decides about the update, and the largest difference only tells how many weights had a chance to be hit.
    Not relative to a small tensor alone: a bias that starts at zero is nothing but a few such updates.
    """
    if reference.numel() == 0:
        return 0.0
    wanted, found = reference.detach().cpu().double(), other.detach().cpu().double()
    same = (wanted == found) | (wanted.isnan() & found.isnan())
    apart = torch.where(same, 0.0, wanted - found).square().mean().sqrt().item()
    size = torch.where(same & ~wanted.isfinite(), 0.0, wanted).square().mean().sqrt().item()
    return relative(apart, 0.0, max(size, typical) if reference.is_floating_point() else max(size, 1.0))
