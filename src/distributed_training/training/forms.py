"""The three forms of a model: outputs plus a criterion; a dict with `loss`; a Hugging Face output with `.loss`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distributed_training.runtime.errors import ModelError

Criterion = Callable[[Any, Any], Tensor]
TARGET_KEYS = ("labels", "label", "targets", "target")
_OUTPUT_KEYS = ("logits", "predictions", "reconstruction", "output")

CRITERIA: dict[str, Criterion] = {
    "cross_entropy": F.cross_entropy,
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "bce": F.binary_cross_entropy_with_logits,
}
_ELEMENTWISE = (F.mse_loss, F.l1_loss, F.binary_cross_entropy_with_logits)
_NARROW_INTEGERS = (torch.int32, torch.int16, torch.int8, torch.uint8)


class Answer(NamedTuple):
    """What a model said about a batch."""

    loss: Tensor | None
    """Mean over the batch; None where neither the model nor a criterion gave one."""
    output: Any
    """Logits, predictions or the model's whole output."""
    targets: Any
    """What the output is compared with, where the batch holds it."""
    name: str = "output"
    """What the model called its output."""


class Forms:
    """Calls a model with a batch of any shape and finds the loss in whatever comes back."""

    def __init__(self, model: nn.Module, criterion: Criterion | None, loss: str = "auto") -> None:
        self._name = type(model).__name__
        self._criterion = criterion if criterion is not None else CRITERIA.get(loss)
        parameters = inspect.signature(model.forward).parameters.values()
        takes_anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._accepted = None if takes_anything else {p.name for p in parameters}

    def __call__(self, model: nn.Module, data: Any, *, need_loss: bool = True) -> Answer:
        """Run the model. With `need_loss` a batch that gives none is an error."""
        if isinstance(data, (tuple, list)):
            targets = data[1] if len(data) > 1 else None
            output = model(data[0])
        elif isinstance(data, Mapping):
            targets = next((data[key] for key in TARGET_KEYS if key in data), None)
            accepted = self._accepted
            output = model(**(data if accepted is None else {k: v for k, v in data.items() if k in accepted}))
        else:
            targets = None
            output = model(data)
        if isinstance(output, Tensor):  # the common form first: this runs every step
            return Answer(self._criterion_loss(output, targets, need_loss), output, targets)
        return self._unpack(output, targets, need_loss)

    def _unpack(self, output: Any, targets: Any, need_loss: bool) -> Answer:
        found = output.get if isinstance(output, Mapping) else lambda key: getattr(output, key, None)
        loss = found("loss")
        key = next((key for key in _OUTPUT_KEYS if found(key) is not None), "")
        main = found(key) if key else None
        if isinstance(loss, Tensor):
            if loss.ndim:
                raise ModelError(f"{self._name} returned a loss of shape {tuple(loss.shape)}; it must be one number")
            return Answer(loss, output if main is None else main, targets, key)
        if isinstance(main, Tensor):
            return Answer(self._criterion_loss(main, targets, need_loss), main, targets)
        if not need_loss:
            return Answer(None, output, targets)
        raise ModelError(
            f"{self._name} returned {_describe(output)}; it must return a tensor (with a criterion), "
            "a dict with 'loss', or an object with .loss"
        )

    def _criterion_loss(self, output: Tensor, targets: Any, need_loss: bool) -> Tensor | None:
        if not need_loss:  # prediction: what stands where targets would be may be placeholders
            return None
        if targets is None:
            raise ModelError(
                f"{self._name} returned a tensor, but the batch has no targets to compare it with; "
                "give batches of (inputs, targets) or return a dict with 'loss'"
            )
        criterion = self._criterion or _criterion_for(targets)
        if criterion is F.cross_entropy:
            if targets.dtype in _NARROW_INTEGERS:
                targets = targets.long()
            if output.ndim > 2 and output.shape[:-1] == targets.shape:
                output, targets = output.flatten(0, -2), targets.flatten()  # (batch, time, classes) of language models
        elif criterion in _ELEMENTWISE:
            if targets.dtype == torch.float64 or not targets.is_floating_point():
                # NumPy's default, which backward would refuse beside fp32.
                targets = targets.to(torch.promote_types(output.dtype, torch.float32))
            if output.ndim == targets.ndim + 1 and output.shape[-1] == 1:
                output = output.squeeze(-1)  # (N, 1) against (N,) would broadcast to (N, N)
        return criterion(output, targets)


def _criterion_for(targets: Any) -> Criterion:
    if isinstance(targets, Tensor) and not targets.is_floating_point():
        return F.cross_entropy
    return F.mse_loss


def _describe(output: Any) -> str:
    if isinstance(output, Mapping):
        return f"a dict without 'loss' (keys {', '.join(map(str, list(output)[:5]))})"
    return f"a {type(output).__name__}"


def is_classification(answer: Answer) -> bool:
    """Whether the output holds one score a class for integer targets."""
    output, targets = answer.output, answer.targets
    return (
        isinstance(output, Tensor)
        and answer.name != "reconstruction"  # of the input: it says nothing about labels that lie beside it
        and isinstance(targets, Tensor)
        and targets.dtype in (torch.int64, torch.int32, torch.uint8, torch.int16)
        and output.ndim == targets.ndim + 1
    )
