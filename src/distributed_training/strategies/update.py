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
from distributed_training.strategies.fused import FUSABLE, DirectSteps, in_pieces

_LARGE = 2**22  # numbers, of which one more reading and writing takes longer than a few launches


class Gradients:
    """The gradients of an update: whole here, in the parameters. Strategies that divide them have their own kind."""

    divided = False
    """Whether this rank has only a part of them."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.parameters = parameters
        self.param_groups = [{"params": parameters}]  # all that the loss scaler wants to know of an optimizer

    def collect(self) -> list[Tensor]:
        """Those that there are, in the order of the parameters; to be changed in place."""
        return [gradient for p in self.parameters if (gradient := p.grad) is not None]

    def clear(self) -> None:
        """Forget them."""
        for p in self.parameters:
            p.grad = None

    def total(self, value: Tensor) -> Tensor:
        """A sum over all gradients, from the sum over those of this rank."""
        return value

    def checksum(self, gradients: list[Tensor]) -> float:
        """A sum that is finite if all of them are."""
        own = sum([g.sum().item() for g in gradients])
        return float(self.total(torch.tensor(own, dtype=torch.float64))) if self.divided else own


class Update:
    """One optimizer's update. On a GPU nothing here waits for the device, unless the optimizer leaves no other way."""

    def __init__(
        self,
        optimizer: Optimizer,
        settings: StepSettings,
        scaler: GradScaler | None,
        gradients: Gradients | None = None,
    ) -> None:
        self.optimizer = optimizer
        self._gradients = gradients or Gradients([p for group in optimizer.param_groups for p in group["params"]])
        self._clip, self._scaler = settings.gradient_clip, scaler
        self._guard = settings.nonfinite
        self._on_cpu = all(p.device.type == "cpu" for p in self._gradients.parameters)
        self._skips_by_itself = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        self._bare_step = _bare_step(optimizer)
        self._direct_step = DirectSteps(optimizer)
        self._begun = False
        self._one: Tensor | None = None

    def __call__(self, loss: Tensor) -> StepResult:
        """Update the weights from the gradients in place, or skip, and clear the gradients."""
        gradients = self._gradients.collect()
        if self._scaler is not None:
            result = self._scaled(gradients, loss)
        else:
            norm = self._clipped(gradients)
            result = self._guarded(gradients, norm, loss)
        self._gradients.clear()
        return result

    def abandon(self) -> None:
        """Forget gradients that were on their way into an update."""
        self._gradients.clear()
        vars(self.optimizer).pop("found_inf", None)

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        """The norm of all gradients together."""
        if not gradients:
            return torch.zeros(())
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        if self._gradients.divided:
            norm = self._gradients.total(norm.double().square()).sqrt().to(norm.dtype)
        return norm

    def _guarded(self, gradients: list[Tensor], norm: Tensor | None, loss: Tensor) -> StepResult:
        if self._guard == "off":
            self._step(gradients)
            return StepResult(norm, False)
        watched = norm if self._guard == "gradients" else loss
        if self._on_cpu:  # reading a value costs nothing here, and sums are cheaper than a norm
            finite = math.isfinite(watched if watched is not None else self._gradients.checksum(gradients))
            if finite:
                self._step(gradients)
            return StepResult(norm, not finite)
        skipped = self._flag(watched, gradients)
        self._step_unless(skipped, gradients)
        return StepResult(norm, skipped)

    def _step_unless(self, skipped: Tensor, gradients: list[Tensor]) -> None:
        # The first step is waited for: SGD makes its momentum then, of whatever lies in memory, and a kernel that skips
        # leaves it so.
        if self._skips_by_itself and not self._on_cpu and (self._begun or self.optimizer.state):
            self.optimizer.found_inf = skipped  # type: ignore[attr-defined]
            self._step(gradients)
            del self.optimizer.found_inf  # type: ignore[attr-defined]
        elif not skipped.item():  # optimizers without a fused kernel cannot be told on the device: one wait a step
            self._step(gradients)
            self._begun = True

    def _flag(self, watched: Tensor | None, gradients: list[Tensor]) -> Tensor:
        """1 on the device if the value watched, or else any gradient, is not finite."""
        flag = self._own_flag(watched, gradients)
        if watched is None and self._gradients.divided:  # kernels that look at the flag know only 0 and 1
            flag = self._gradients.total(flag).clamp(max=1)
        return flag

    def _own_flag(self, watched: Tensor | None, gradients: list[Tensor]) -> Tensor:
        if watched is None and len({g.dtype for g in gradients}) == 1 and not any(g.is_sparse for g in gradients):
            flag = torch.zeros((), device=gradients[0].device)  # no dimension, like Adam's own step counts
            if self._one is None or self._one.device != flag.device:
                self._one = torch.ones_like(flag)
            if _is_recorded(gradients):
                gradients = _to_look_at(gradients)
            # The loss scaler's kernel with a scale of 1: one launch for all gradients.
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, flag, self._one)
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
            direct = self._on_cpu or _is_recorded(gradients)
            if not (direct and self._direct_step(gradients, getattr(optimizer, "found_inf", None))):
                self._bare_step(optimizer)

    def _scaled(self, gradients: list[Tensor], loss: Tensor) -> StepResult:
        scaler = self._scaler
        assert scaler is not None
        if not gradients:
            return StepResult(None, False)
        scaler.unscale_(self._gradients)  # type: ignore[arg-type]
        flags = list(scaler._found_inf_per_device(self._gradients).values())  # type: ignore[arg-type]
        if self._gradients.divided:  # ranks must agree on the step and on the next scale
            for flag in flags:
                flag.copy_(self._gradients.total(flag))
        norm = self._clipped(gradients)
        found = torch.stack([flag.sum() for flag in flags]).sum().clamp(max=1)
        # Overflows while the scaler looks for its scale are its normal work; below 1 there is nothing left to find.
        scale = scaler._get_scale_async()
        assert scale is not None
        skipped = ((found > 0) & (scale < 1) | ~torch.isfinite(loss)).float()
        self._step_unless(found, gradients)
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


def _to_look_at(gradients: list[Tensor]) -> list[Tensor]:
    """What is not finite if any gradient is not, for a recorded step, where launches are cheap.

    Small gradients are cut, so that more of the GPU has work.

    The kernel that looks writes what it has read. Of large gradients it looks at the largest number of each: that costs
    one reading of them all, and no writing.
    """
    if sum(gradient.numel() for gradient in gradients) < _LARGE:
        return in_pieces([gradients], 96)[0]
    return [torch.stack(torch._foreach_norm(gradients, math.inf))]


def _is_recorded(gradients: list[Tensor]) -> bool:
    """Whether this is becoming part of a CUDA graph."""
    return bool(gradients) and gradients[0].is_cuda and torch.cuda.is_current_stream_capturing()


def _profiler_is_on() -> bool:
    return bool(torch.autograd.profiler._is_profiler_enabled)
