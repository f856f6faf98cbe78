"""The arithmetic of a step: autocast, loss scaling and TF32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from distributed_training.runtime.errors import ConfigError

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class LossScaler(torch.amp.GradScaler):
    """torch's, for gradients that were brought to the CPU, too."""

    def _unscale_grads_(self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> Any:
        # torch has the scale copied to where the gradients lie and does not wait for it: on the CPU they would be
        # multiplied by whatever lies there. What is on the CPU already is copied at once.
        if any(p.grad is not None and p.grad.device.type == "cpu" for g in optimizer.param_groups for p in g["params"]):
            inv_scale, found_inf = inv_scale.cpu(), found_inf.cpu()
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)


class Precision:
    """One of fp32, tf32, bf16, fp16 on a device, with what torch needs for it."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = resolve_precision(name, device)
        self._device = device
        self._saved: tuple[str, bool] | None = None
        # fp16 gradients underflow, so the loss is scaled up for the backward pass; bf16 has the range of fp32.
        self.scaler = LossScaler(device.type) if self.name == "fp16" else None
        dtype = _AUTOCAST.get(self.name)
        self.autocast: AbstractContextManager[Any] = (
            torch.autocast(device.type, dtype=dtype) if dtype is not None else nullcontext()
        )

    def apply(self) -> None:
        """Set torch's process-wide switches: fp32 means fp32 in convolutions too, tf32 allows both."""
        if self._device.type != "cuda":
            return
        self._saved = (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)
        torch.set_float32_matmul_precision("highest" if self.name == "fp32" else "high")
        torch.backends.cudnn.allow_tf32 = self.name != "fp32"

    def restore(self) -> None:
        """Put the switches back."""
        if self._saved is not None:
            torch.set_float32_matmul_precision(self._saved[0])
            torch.backends.cudnn.allow_tf32 = self._saved[1]
            self._saved = None


def resolve_precision(name: str, device: torch.device) -> str:
    """The precision that a setting means on this device."""
    if name == "auto":
        if device.type != "cuda":
            return "fp32"
        return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp16"
    if name == "tf32" and device.type != "cuda":
        raise ConfigError("training.precision=tf32 needs an NVIDIA GPU; use fp32 or bf16 on the CPU")
    return name
