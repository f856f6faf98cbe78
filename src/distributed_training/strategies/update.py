"""From gradients to new weights: unscale, norm, clip, guard, fused optimizer step, clear.

Shared by the strategies that use a plain torch optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from distributed_training.strategies.base import StepResult, StepSettings
from distributed_training.strategies.fused import FUSABLE, DirectSteps


class Update:
    """One optimizer's update. On a GPU nothing here waits for the device, unless the optimizer leaves no other way."""

    def __init__(self, optimizer: Optimizer, settings: StepSettings, scaler: GradScaler | None) -> None:
        self.optimizer = optimizer
        self._clip, self._scaler = settings.gradient_clip, scaler
        self._guard = settings.nonfinite
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._on_cpu = all(p.device.type == "cpu" for p in self._parameters)
        self._skips_by_itself = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        self._bare_step = _bare_step(optimizer)
        self._direct_step = DirectSteps(optimizer)

    def __call__(self, loss: Tensor) -> StepResult:
        """Update the weights from the gradients in place, or skip, and clear the gradients."""
        parameters = self._parameters
        gradients = [gradient for p in parameters if (gradient := p.grad) is not None]
        if self._scaler is not None:
            result = self._scaled(gradients, loss)
        else:
            norm = self._clipped(gradients)
            result = self._guarded(gradients, norm, loss)
        for p in parameters:
            p.grad = None
        return result

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        """The norm of all gradients together."""
        if not gradients:
            return torch.zeros(())
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))

    def _guarded(self, gradients: list[Tensor], norm: Tensor | None, loss: Tensor) -> StepResult:
        if self._guard == "off":
            self._step(gradients)
            return StepResult(norm, False)
        watched = norm if self._guard == "gradients" else loss
        if self._on_cpu:  # reading a value costs nothing here, and sums are cheaper than a norm
            finite = math.isfinite(watched if watched is not None else sum([g.sum().item() for g in gradients]))
            if finite:
                self._step(gradients)
            return StepResult(norm, not finite)
        skipped = self._flag(watched, gradients)
        if self._skips_by_itself:  # a fused kernel looks at the flag on the device
            self.optimizer.found_inf = skipped  # type: ignore[attr-defined]
            self._step(gradients)
            del self.optimizer.found_inf  # type: ignore[attr-defined]
        elif not skipped.item():  # other optimizers cannot be told on the device: one wait a step
            self._step(gradients)
        return StepResult(norm, skipped)

    def _flag(self, watched: Tensor | None, gradients: list[Tensor]) -> Tensor:
        """1 on the device if the value watched, or else any gradient, is not finite."""
        if watched is None and len({g.dtype for g in gradients}) == 1 and not any(g.is_sparse for g in gradients):
            flag = torch.zeros((), device=gradients[0].device)  # no dimension, like Adam's own step counts
            # The loss scaler's kernel with a scale of 1: one launch for all gradients.
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, flag, torch.ones_like(flag))
            return flag
        if watched is None:
            watched = torch.stack([g.sum().float() for g in gradients]).sum() if gradients else torch.zeros(())
        return torch.isfinite(watched).logical_not().float().reshape(())

    def _step(self, gradients: list[Tensor]) -> None:
        optimizer = self.optimizer
        # A learning-rate scheduler puts a `step` of its own on the optimizer, to count the calls.
        hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        if self._bare_step is None or hooked or "step" in vars(optimizer) or _profiler_is_on():
            optimizer.step()
            return
        with torch.no_grad():
            if not (self._on_cpu and self._direct_step(gradients)):  # a GPU's step has a flag to look at
                self._bare_step(optimizer)

    def _scaled(self, gradients: list[Tensor], loss: Tensor) -> StepResult:
        scaler = self._scaler
        assert scaler is not None
        if not gradients:
            return StepResult(None, False)
        scaler.unscale_(self.optimizer)
        norm = self._clipped(gradients)
        found = torch.stack([flag.sum() for flag in scaler._found_inf_per_device(self.optimizer).values()]).sum()
        # Overflows while the scaler looks for its scale are its normal work; below 1 there is nothing left to find.
        scale = scaler._get_scale_async()
        assert scale is not None
        skipped = ((found > 0) & (scale < 1) | ~torch.isfinite(loss)).float()
        scaler.step(self.optimizer)
        scaler.update()
        return StepResult(norm, bool(skipped) if self._on_cpu else skipped)

    def _clipped(self, gradients: list[Tensor]) -> Tensor | None:
        """Scale the gradients down to the largest norm allowed; their norm before that."""
        if self._clip is None:
            return None
        norm = self.total_norm(gradients)
        if gradients:
            torch._foreach_mul_(gradients, torch.clamp(self._clip / (norm + 1e-6), max=1.0))
        return norm


def _bare_step(optimizer: Optimizer) -> Callable[[Optimizer], Any] | None:
    """The step of torch's own optimizers without the wrappers that label it for the profiler and call hooks: these
    cost more than the update of a small model. None where somebody else has a say in the step."""
    if type(optimizer) not in FUSABLE:
        return None
    step: Any = type(optimizer).step
    while hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step


def _profiler_is_on() -> bool:
    return bool(torch.autograd.profiler._is_profiler_enabled)
