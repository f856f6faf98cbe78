"""torch's fused optimizer kernels, called directly.

Before its kernel runs, an optimizer's own `step` collects states and groups tensors by device and type in Python: more
work than the update of a small model itself. On the CPU, where nothing hides that time, a step that is plainly the
common case goes straight to the kernel. Every other case, the first step that makes the state among them, is left to
the optimizer.

A GPU's kernel gives 65,536 numbers to each of its blocks, so that the update of a small model runs on a few of them, as
long as that of one a hundred times its size. When such a step is recorded, its tensors are given in pieces.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_CHUNK = 65536  # numbers that a GPU's kernel gives to a block
_LEAST = 2048  # numbers in a piece
_PIECES = 24  # of all tensors together: more would take a second launch
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
        devices = {p.device for p in parameters}
        if len(self._dtypes) != 1 or len(devices) != 1 or next(iter(devices)).type not in ("cpu", "cuda"):
            self._collect = None
        self._cut = self._collect is not None and next(iter(devices)).type == "cuda"

    def __call__(self, gradients: list[Tensor], skipped: Tensor | None = None) -> bool:
        """Update the weights from all gradients in the order of the parameters. False: nothing was done.

        `skipped`: on the device, 1 where the weights are to stay as they are.
        """
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
        flag = {} if skipped is None else {"found_inf": skipped}
        for group, (kernel, states, counts, options), some in groups:
            lists = [group["params"], some, *states]
            if counts:  # Adam's kernels are told the number of the step, which they do not count themselves
                torch._foreach_add_(counts, 1)
            kernel(*(in_pieces(lists) if self._cut else lists), **options, **flag)
            if counts and skipped is not None:
                torch._foreach_sub_(counts, [skipped] * len(counts))
        return True


def in_pieces(lists: list[list[Tensor]], most: int = _PIECES) -> list[list[Tensor]]:
    """Lists of tensors that belong together, row by row, with small ones cut so that more blocks of a GPU have work.

    A single number (a step count) stands beside each piece. What is large anyway, or not in plain order, stays whole.
    """
    size = max(_LEAST, -(-sum(tensor.numel() for tensor in lists[0]) // most))
    size = -(-size // 64) * 64
    if size >= _CHUNK:
        return lists
    used = [number for number, tensors in enumerate(lists) if tensors]
    cut: list[list[Tensor]] = [[] for _ in lists]
    for row in zip(*(lists[number] for number in used)):
        pieces = -(-row[0].numel() // size)
        whole = pieces < 2 or not all(tensor.is_contiguous() for tensor in row)
        for number, tensor in zip(used, row):
            if whole or tensor.numel() == 1:
                cut[number] += [tensor] * (1 if whole else pieces)
            else:
                cut[number] += tensor.detach().view(-1).split(size)
    return cut


def _sgd(group: dict[str, Any], state: Any) -> Any:
    momentum = group["momentum"]
    options = {key: group[key] for key in ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")}
    buffers = [_tensor(state[p], "momentum_buffer") for p in group["params"]] if momentum else []
    return torch._fused_sgd_, (buffers,), [], {**options, "is_first_step": False}


def _adam(group: dict[str, Any], state: Any) -> Any:
    beta1, beta2 = group["betas"]
    options = {key: group[key] for key in ("weight_decay", "lr", "eps", "amsgrad", "maximize")}
    states = [state[p] for p in group["params"]]
    steps = [s["step"] for s in states]
    largest = [s["max_exp_avg_sq"] for s in states] if group["amsgrad"] else []
    lists = ([s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states], largest, steps)
    return _ADAM[group["decoupled_weight_decay"]], lists, steps, {**options, "beta1": beta1, "beta2": beta2}


def _tensor(state: dict[str, Any], key: str) -> Tensor:
    value = state[key]
    if value is None:
        raise KeyError(key)
    return value


_ADAM = {False: torch._fused_adam_, True: torch._fused_adamw_}
_COLLECTORS = {torch.optim.SGD: _sgd, torch.optim.Adam: _adam, torch.optim.AdamW: _adam}
