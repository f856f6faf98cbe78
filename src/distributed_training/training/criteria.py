"""What a criterion says of a part of a batch, so that the parts of all ranks add up to what it says of the whole.

A mean over samples is put together by counting rows. Cross entropy with class weights or ignored targets is not such a
mean: it divides by a number of its own, which every rank can compute, since each is given the targets of the whole
batch. Criteria that are not torch's own are tried on the first batches: cut in two, is the loss the mean of the parts,
or their sum? One that is neither cannot be computed in parts, and is refused.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distributed_training.data.nested import map_tensors, tensors_in
from distributed_training.runtime.errors import ConfigError, ModelError
from distributed_training.runtime.world import named
from distributed_training.strategies.base import Strategy
from distributed_training.training.forms import Criterion

Reduction = Literal["auto", "mean", "sum"]
PartLoss = Callable[[Any, Any, int], Tensor]
"""(output, targets, rows) of a part to its loss. Weighted by rows over those of the batch, the parts add up."""

_OF_FUNCTION: dict[Any, Any] = {
    F.cross_entropy: nn.CrossEntropyLoss,
    F.nll_loss: nn.NLLLoss,
    F.mse_loss: nn.MSELoss,
    F.l1_loss: nn.L1Loss,
    F.smooth_l1_loss: nn.SmoothL1Loss,
    F.huber_loss: nn.HuberLoss,
    F.binary_cross_entropy: nn.BCELoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    F.kl_div: nn.KLDivLoss,
}
_WITH_A_NORMALISER = (nn.CrossEntropyLoss, nn.NLLLoss)
_BROADCASTING = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)
_WEIGHTED_BY_ELEMENT = (nn.BCELoss, nn.BCEWithLogitsLoss)
_BY_ROWS = (
    *_BROADCASTING,
    *_WEIGHTED_BY_ELEMENT,
    nn.KLDivLoss,
    nn.PoissonNLLLoss,
    nn.SoftMarginLoss,
    nn.HingeEmbeddingLoss,
    nn.MultiMarginLoss,
    nn.MultiLabelMarginLoss,
    nn.MultiLabelSoftMarginLoss,
)
_TRIALS = 3  # batches on which a criterion is tried that is not torch's own
_CLOSE = 1e-5


class Criteria:
    """Turns the criteria of a training into losses of parts. Called by all ranks alike."""

    def __init__(self, strategy: Strategy, reduction: Reduction, parts: int) -> None:
        if reduction not in get_args(Reduction):
            raise ConfigError(f"reduction={reduction!r} is none of {', '.join(get_args(Reduction))}")
        self._strategy, self._reduction = strategy, reduction
        self._whole = strategy.world_size == 1 and parts == 1
        self._trials: dict[str, int] = {}
        self._found: dict[str, str] = {}

    def part_loss(self, criterion: Criterion, targets: Any, rows: int) -> PartLoss:
        """How the loss of a part is computed in a step over these targets, `rows` samples in all."""
        if not callable(criterion):
            raise ConfigError(f"criterion is a {type(criterion).__name__}; give a function of (output, targets)")
        if isinstance(criterion, nn.Module):
            criterion.to(self._strategy.device)
        if self._whole:
            return lambda output, some, _: _number(criterion(output, some), criterion)
        known = _as_module(criterion)
        if known is not None:
            return _known(known.to(self._strategy.device), targets, rows)
        if self._reduction != "auto":
            return _reduced(criterion, self._reduction, rows)
        tried = False

        def loss(output: Any, some: Any, own: int) -> Tensor:
            nonlocal tried
            if not tried:
                tried = True
                self._try(criterion, output, some, own)
            return _reduced(criterion, self._found.get(name, "mean"), rows)(output, some, own)

        name = criterion_name(criterion)
        return loss

    def _try(self, criterion: Criterion, output: Any, targets: Any, rows: int) -> None:
        """Find out how parts add up, on the first batches that the criterion sees."""
        name = criterion_name(criterion)
        if self._trials.get(name, 0) >= _TRIALS:
            return
        self._trials[name] = self._trials.get(name, 0) + 1
        verdicts = self._strategy.gather_values(_verdict(criterion, output, targets, rows))
        wrong = [str(rank) for rank, verdict in enumerate(verdicts) if verdict == "neither"]
        kinds = {verdict for verdict in [*verdicts, self._found.get(name, "unclear")] if verdict != "unclear"}
        if wrong or len(kinds) > 1:
            where = f" on {named(wrong)}" if wrong and len(verdicts) > 1 else ""
            raise ModelError(
                f"{name}: the loss of a batch is neither the mean nor the sum of the losses of its samples{where}, so "
                "that ranks cannot share the batch. Use a criterion of torch, which is known (class weights and "
                "ignored targets too), or one that is a mean over samples; or promise with "
                "create_distributed_trainer(reduction='mean') that it is one"
            )
        if kinds:
            self._found[name] = kinds.pop()


def criterion_name(criterion: Any) -> str:
    """What a criterion is called, the same in every process."""
    of = criterion if hasattr(criterion, "__qualname__") else type(criterion)
    code = getattr(criterion, "__code__", None)  # lambdas have all the same name
    return f"{of.__module__}.{of.__qualname__}{f' (line {code.co_firstlineno})' if code is not None else ''}"


def _as_module(criterion: Any) -> nn.Module | None:
    """The module of torch that a criterion is or stands for; None where it is somebody's own."""
    settings: dict[str, Any] = {}
    if isinstance(criterion, functools.partial) and not criterion.args:
        criterion, settings = criterion.func, criterion.keywords
    kind = _OF_FUNCTION.get(criterion) if inspect.isfunction(criterion) or inspect.isbuiltin(criterion) else None
    if kind is not None:
        try:
            return kind(**settings)
        except TypeError:
            return None
    return criterion if type(criterion) in (*_WITH_A_NORMALISER, *_BY_ROWS) else None


def _known(criterion: nn.Module, targets: Any, rows: int) -> PartLoss:
    """The loss of a part by a criterion of torch."""
    if criterion.reduction == "sum":
        return _reduced(criterion, "sum", rows)
    labels = isinstance(targets, Tensor) and not targets.is_floating_point()
    if labels and criterion.reduction == "mean" and isinstance(criterion, _WITH_A_NORMALISER):
        return _normalised(criterion, targets, rows)
    _check_elements(criterion, targets, rows)
    mean = _reduced(criterion, "mean", rows)
    if not isinstance(criterion, _BROADCASTING):
        return mean

    def without_broadcasting(output: Any, some: Any, own: int) -> Tensor:
        if isinstance(output, Tensor) and isinstance(some, Tensor) and output.ndim != some.ndim:
            raise ModelError(
                f"{type(criterion).__name__} of outputs {tuple(output.shape)} and targets {tuple(some.shape)} would "
                "compare every sample with every other; give both the same shape, with squeeze or unsqueeze"
            )
        return mean(output, some, own)

    return without_broadcasting


def _check_elements(criterion: nn.Module, targets: Any, rows: int) -> None:
    weight = getattr(criterion, "weight", None)
    if not isinstance(criterion, _WEIGHTED_BY_ELEMENT) or not isinstance(weight, Tensor) or rows == 1:
        return
    if isinstance(targets, Tensor) and weight.ndim == targets.ndim and len(weight) == rows:
        raise ModelError(
            f"{type(criterion).__name__}(weight=...) has a weight for every sample of the batch, which ranks cannot "
            "share; multiply the losses in a criterion of your own that takes the weights with the targets"
        )


def _reduced(criterion: Criterion, reduction: str, rows: int) -> PartLoss:
    if reduction == "mean":
        return lambda output, some, own: _number(criterion(output, some), criterion)
    return lambda output, some, own: _number(criterion(output, some), criterion) * (rows / own)


def _normalised(criterion: nn.Module, targets: Tensor, rows: int) -> PartLoss:
    """The part's sum over what the criterion would divide the whole by; a part without any of it counts zero."""
    summed = copy.copy(criterion)
    summed.reduction = "sum"  # type: ignore[assignment]
    whole = _normaliser(criterion, targets)
    return lambda output, some, own: summed(output, some) / whole.to(output.device, non_blocking=True) * (rows / own)


def _normaliser(criterion: Any, targets: Tensor) -> Tensor:
    """What the mean of cross entropy divides by: targets that count, each with the weight of its class."""
    counts = targets != criterion.ignore_index
    if criterion.weight is None:
        return counts.sum()
    weight = criterion.weight.to(targets.device)
    # A target that is no class is left for the criterion itself to refuse.
    return (weight[targets.long().clamp(0, len(weight) - 1)] * counts).sum()


def _number(loss: Any, criterion: Any) -> Tensor:
    if isinstance(loss, Tensor) and loss.ndim == 0:
        return loss
    what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
    raise ModelError(
        f"{criterion_name(criterion)} gave {what}; a loss is one number: use reduction='mean', or average it"
    )


@torch.no_grad()
def _verdict(criterion: Criterion, output: Any, targets: Any, rows: int) -> str:
    """mean, sum, neither, or unclear: how the loss of these rows is made of those of its parts."""
    tensors = [*tensors_in(output), *tensors_in(targets)]
    if not tensors or any(t.ndim == 0 or len(t) != rows for t in tensors):
        return "neither"  # something in it belongs to no sample
    output = map_tensors(lambda t: t.float() if t.dtype in (torch.float16, torch.bfloat16) else t, output)
    cut = rows // 3 or 1

    def loss(take: Callable[[Tensor], Tensor]) -> float:
        return float(_number(criterion(map_tensors(take, output), map_tensors(take, targets)), criterion))

    whole = loss(lambda t: t)
    try:
        if rows == 1:
            mean = loss(lambda t: torch.cat([t, t]))
            total = mean / 2
        else:
            one, other = loss(lambda t: t[:cut]), loss(lambda t: t[cut:])
            mean, total = (one * cut + other * (rows - cut)) / rows, one + other
    except (RuntimeError, ValueError, IndexError):  # it takes no other number of samples
        return "neither"
    bound = _CLOSE * max(abs(whole), abs(mean), abs(total), _CLOSE)
    is_mean, is_sum = abs(mean - whole) <= bound, abs(total - whole) <= bound
    if is_mean == is_sum:
        return "unclear" if is_mean or not math.isfinite(whole) else "neither"
    return "mean" if is_mean else "sum"
