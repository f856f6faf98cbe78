"""The channels of convolutions innermost: the order that tensor cores work on.

Kernels turn every input and gradient around where neither input nor weight lies so; they follow whichever does.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

_REDUCED = ("bf16", "fp16")
_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)


def wants_channels_last(model: nn.Module, device: torch.device, precision: str, choice: str) -> bool:
    """What the setting `choice` (auto, on or off) means for this model on this device."""
    if choice != "auto":
        return choice == "on"
    return device.type == "cuda" and precision in _REDUCED and has_convolutions(model)


def has_convolutions(model: nn.Module) -> bool:
    return any(isinstance(module, _CONVOLUTIONS) for module in model.modules())


def turn_weights(model: nn.Module) -> None:
    """Store weights so, which makes all activations so. Not for whoever flattens weights and gradients."""
    _expect_other_strides()
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def turn_inputs(model: nn.Module) -> list[RemovableHandle]:
    """Give inputs so to each convolution, whose weights stay as they are and are turned in each step.

    To each, not to the first alone: what lies between two may lose the order, and asking costs nothing.
    """
    _expect_other_strides()
    return [m.register_forward_pre_hook(_turn) for m in model.modules() if isinstance(m, _CONVOLUTIONS)]


def _expect_other_strides() -> None:
    # Of kernels of one pixel, which lie the same way in both orders. The copy that DDP speaks of it makes in any case.
    warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides", UserWarning)


def _turn(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    if inputs and isinstance(inputs[0], Tensor) and inputs[0].ndim == 4:
        return inputs[0].contiguous(memory_format=torch.channels_last), *inputs[1:]
    return inputs
