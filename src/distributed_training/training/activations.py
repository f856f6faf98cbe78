"""Gradient checkpointing: recompute activations in the backward pass instead of keeping them."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from distributed_training.models.base import statistics_kept
from distributed_training.runtime.errors import ModelError


def enable_gradient_checkpointing(model: nn.Module) -> None:
    """Use the model's own switch (`gradient_checkpointing_enable`), or else recompute its blocks one by one."""
    switch: Any = getattr(model, "gradient_checkpointing_enable", None)
    if switch is not None:
        # transformers asks which of torch's two ways; the older one knows no frozen inputs, which adapters have.
        takes_way = "gradient_checkpointing_kwargs" in inspect.signature(switch).parameters
        switch(**({"gradient_checkpointing_kwargs": {"use_reentrant": False}} if takes_way else {}))
        return
    blocks = _blocks(model)
    if not blocks:
        raise ModelError(
            f"{type(model).__name__} has no gradient_checkpointing_enable() and no nn.Sequential or nn.ModuleList "
            "whose parts could be recomputed; add that method to it or leave training.gradient_checkpointing off"
        )
    for block in blocks:
        if not getattr(block.forward, "recomputed", False):
            block.forward = _recomputing(block, block.forward)


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The parts of the outermost containers: blocks large enough to be worth it, none inside another."""
    found: list[nn.Module] = []
    for module in [model] if isinstance(model, (nn.Sequential, nn.ModuleList)) else model.children():
        if isinstance(module, (nn.Sequential, nn.ModuleList)):
            found += [part for part in module if any(True for _ in part.parameters())]
        else:
            found += _blocks(module)
    return found


def _recomputing(block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not block.training:
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # the compiler recomputes without side effects, and takes no contexts
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        contexts = lambda: (contextlib.nullcontext(), statistics_kept(block))  # noqa: E731
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    recomputed.recomputed = True  # type: ignore[attr-defined]
    return recomputed
