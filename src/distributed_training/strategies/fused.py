"""torch's fused optimizer kernels, called directly.

Before its kernel runs, an optimizer's own `step` collects states and groups tensors by device and type in Python: more
work than the update of a small model itself. On the CPU, where nothing hides that time, a step that is plainly the
common case goes straight to the kernel. Every other case, the first step that makes the state among them, is left to
the optimizer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

FUSABLE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


def use_fused(optimizer: Optimizer) -> bool:
    """Switch an optimizer that has taken no step yet to its fused kernel, where torch has one for its parameters."""
    if type(optimizer) not in FUSABLE or optimizer.state:
        return False
    defaults = optimizer.defaults
    settings = [defaults, *optimizer.param_groups]
    chosen = any(s.get(key) for s in settings for key in ("fused", "foreach", "capturable", "differentiable"))
    if chosen or defaults.get("fused") is False:  # the user decided
        return bool(defaults.get("fused"))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not all(p.is_floating_point() and p.device.type in ("cuda", "cpu") for p in parameters):
        return False
    for group in optimizer.param_groups:
        group["fused"], group["foreach"] = True, False
    defaults["fused"], defaults["foreach"] = True, False
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    return True


class DirectSteps:
    """Takes the plain steps of one optimizer by direct kernel calls."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer, self._collect = optimizer, _COLLECTORS.get(type(optimizer))
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._count, self._dtypes = len(parameters), {p.dtype for p in parameters}
        if len(self._dtypes) != 1 or any(p.device.type != "cpu" for p in parameters):
            self._collect = None

    def __call__(self, gradients: list[Tensor]) -> bool:
        """Update the weights from all gradients in the order of the parameters. False: nothing was done."""
        collect, optimizer = self._collect, self._optimizer
        if collect is None or len(gradients) != self._count or any(g.is_sparse for g in gradients):
            return False
        groups, at = [], 0
        try:
            for group in optimizer.param_groups:
                end = at + len(group["params"])
                groups.append((group, collect(group, optimizer.state), gradients[at:end]))
                at = end
        except KeyError:  # the state is not there yet: the optimizer makes it in its first step
            return False
        if at != self._count or not all(group["fused"] for group, _, _ in groups):
            return False
        for group, (kernel, states, options), some in groups:
            kernel(group["params"], some, *states, **options)
        return True


def _sgd(group: dict[str, Any], state: Any) -> Any:
    momentum = group["momentum"]
    options = {key: group[key] for key in ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")}
    buffers = [_tensor(state[p], "momentum_buffer") for p in group["params"]] if momentum else []
    return torch._fused_sgd_, (buffers,), {**options, "is_first_step": False}


def _adam(group: dict[str, Any], state: Any) -> Any:
    beta1, beta2 = group["betas"]
    options = {key: group[key] for key in ("weight_decay", "lr", "eps", "amsgrad", "maximize")}
    states = [state[p] for p in group["params"]]
    steps = [s["step"] for s in states]
    largest = [s["max_exp_avg_sq"] for s in states] if group["amsgrad"] else []
    lists = ([s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states], largest, steps)
    return _ADAM[group["decoupled_weight_decay"]], lists, {**options, "beta1": beta1, "beta2": beta2}


def _counted(kernel: Any) -> Any:
    """Adam's kernels are told the number of the step, which they do not count themselves."""

    def run(
        parameters: Any, gradients: Any, averages: Any, squares: Any, largest: Any, steps: Any, **options: Any
    ) -> None:
        torch._foreach_add_(steps, 1)
        kernel(parameters, gradients, averages, squares, largest, steps, **options)

    return run


def _tensor(state: dict[str, Any], key: str) -> Tensor:
    value = state[key]
    if value is None:
        raise KeyError(key)
    return value


_ADAM = {False: _counted(torch._fused_adam_), True: _counted(torch._fused_adamw_)}
_COLLECTORS = {torch.optim.SGD: _sgd, torch.optim.Adam: _adam, torch.optim.AdamW: _adam}
