"""Evaluation and prediction: every sample once, in the dataset's order, without gradients."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from distributed_training.data.base import Batch, BatchSource
from distributed_training.data.nested import map_tensors
from distributed_training.runtime.errors import DataError, ModelError
from distributed_training.strategies.base import Strategy
from distributed_training.training.engine import Engine
from distributed_training.training.forms import Answer, is_classification
from distributed_training.training.metrics import Accuracy, NamedMetrics

Metrics = Mapping[str, Any] | Sequence[str]
"""torchmetrics by name, or names of `training.metrics`."""


def evaluate(engine: Engine, source: BatchSource, metrics: Metrics | None) -> dict[str, float]:
    """Mean loss over all samples (of tokens: over all that are judged) and metrics: torchmetrics, or names of
    `training.metrics`; left out, accuracy for classifiers and perplexity for language models.

    Ranks share the samples of each batch, and their sums are put together at the end: as exact as one process.
    """
    strategy = engine.strategy
    total = torch.zeros((), device=strategy.device, dtype=torch.float64)
    counted: Any = 0  # targets that are judged; on the device where they are tokens, so that nobody waits for it
    samples = 0
    chosen: _Chosen | None = None
    with evaluating(engine.model):
        for answer, batch, data in _answers(engine, source, need_loss=True):
            assert answer.loss is not None
            if chosen is None:
                chosen = _Chosen(metrics, answer, engine)
            if batch.padding:  # another rank's sample: run for its part in the exchange, not counted
                continue
            judged, loss = engine.judged(data), answer.loss.double()
            if judged is not None:
                loss = torch.where(judged > 0, loss, 0.0)  # the mean over no target at all is NaN
            total += loss * (batch.size if judged is None else judged)
            counted = counted + (batch.size if judged is None else judged)
            samples += batch.size
            chosen.update(answer)
    shared = source.share.ranks > 1
    sums = torch.stack((total, torch.as_tensor(counted).to(total), torch.as_tensor(samples).to(total)))
    if shared:
        sums = strategy.reduce(sums)
    summed, targets, seen = sums.tolist()
    if not seen:
        raise DataError("the validation data is empty")
    if not targets:
        raise DataError("the validation data has nothing to judge: every label is -100")
    assert chosen is not None
    return {"loss": summed / targets, **chosen.values(summed / targets, strategy if shared else None)}


class _Chosen:
    """The metrics of one evaluation."""

    def __init__(self, metrics: Metrics | None, answer: Answer, engine: Engine) -> None:
        self._named: NamedMetrics | None = None
        if isinstance(metrics, Mapping):
            self._all = _start(metrics, engine.strategy.device)
        else:
            self._named = NamedMetrics(metrics, answer, engine.targets, engine.strategy.device)
            self._all = self._named.counts

    def update(self, answer: Answer) -> None:
        if self._named is not None:
            self._named.update(answer)
            return
        for metric in self._all.values():
            metric.update(answer.output, answer.targets)

    def values(self, loss: float, strategy: Strategy | None) -> dict[str, float]:
        """The numbers, put together over ranks with a strategy."""
        values = self._named.of_loss(loss) if self._named is not None else {}
        for metric in self._all.values():
            _put_together(metric, strategy)
        for name, metric in self._all.items():
            values |= _numbers(name, metric.compute())
            metric.reset()
        return values


def _put_together(metric: Any, strategy: Strategy | None) -> None:
    """Have a metric count for all ranks, a torchmetric when it is computed; with None, not at all."""
    if isinstance(metric, Accuracy) and strategy is not None:
        metric.sum_over(strategy.reduce)
    part: Any
    for part in metric.modules() if isinstance(metric, nn.Module) else ():
        if hasattr(part, "dist_sync_fn"):
            part.distributed_available_fn = (lambda: True) if strategy is not None else (lambda: False)
            part.dist_sync_fn = functools.partial(_parts_of_ranks, strategy) if strategy is not None else None


def _parts_of_ranks(strategy: Strategy, value: Tensor, group: Any = None) -> list[Tensor]:
    if value.ndim == 0:
        return list(strategy.gather(value[None]).unbind())
    lengths = strategy.gather(torch.tensor([len(value)], device=value.device)).tolist()
    return list(strategy.gather(value).split(lengths))


def gather_rows(strategy: Strategy, value: Any, batch: Batch | None) -> Any:
    """The rows of every rank's part of a batch, in the batch's order; padding is left out."""
    padding = batch is not None and batch.padding

    def gather(tensor: Tensor) -> Tensor:
        rows = tensor[None] if tensor.ndim == 0 else tensor
        return strategy.gather(rows[:0] if padding else rows)

    return map_tensors(gather, value)


def _numbers(name: str, value: Any) -> dict[str, float]:
    """A metric's value as single numbers: `f1`, or `f1_0`, `f1_1`, ... for one of several, or by its own keys."""
    if isinstance(value, Mapping):
        return {key: number for inner, v in value.items() for key, number in _numbers(f"{name}_{inner}", v).items()}
    flat = torch.as_tensor(value).flatten().tolist()
    return {name: flat[0]} if len(flat) == 1 else {f"{name}_{i}": number for i, number in enumerate(flat)}


def predict(engine: Engine, source: BatchSource) -> Any:
    """The model's outputs for all samples, on the CPU, in the dataset's order."""
    outputs: list[Any] = []
    with evaluating(engine.model):
        for answer, batch, _ in _answers(engine, source, need_loss=False):
            output = answer.output
            if source.share.ranks > 1:
                output = map_tensors(functools.partial(_widen, engine.strategy), output)
                output = gather_rows(engine.strategy, output, batch)
            outputs.append(map_tensors(lambda t: t.float().cpu() if t.is_floating_point() else t.cpu(), output))
    tensors = bool(outputs) and all(isinstance(output, Tensor) for output in outputs)
    if tensors and len({output.shape[1:] for output in outputs}) == 1:  # batches of texts may differ in their longest
        return torch.cat(outputs)
    return outputs


def _widen(strategy: Strategy, scores: Tensor) -> Tensor:
    """Scores of tokens, filled up to the longest text of any rank: each has padded its own texts only."""
    if scores.ndim != 3:
        return scores
    longest = int(strategy.gather(torch.tensor([scores.shape[1]], device=scores.device)).max())
    return torch.nn.functional.pad(scores, (0, 0, 0, longest - scores.shape[1]))


def _answers(engine: Engine, source: BatchSource, *, need_loss: bool) -> Iterator[tuple[Answer, Batch, Any]]:
    """What the model says of each batch, the batch, and its data as the model saw it."""
    for _, batch in source.batches(0):
        with engine.autocast:
            data = engine.place(batch)
            answer = engine.answer(data, need_loss=need_loss)
        yield answer, batch, data


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """No gradients, and every module in its evaluation mode; each gets its own mode back, frozen ones too."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, was_training in modes:
            module.training = was_training


def classes_of(answer: Answer) -> int | None:
    """Number of classes where the model gave one score a class for each sample's label; else None."""
    if not is_classification(answer) or answer.output.ndim != 2 or answer.output.shape[1] < 2:
        return None
    return int(answer.output.shape[1])


def _start(metrics: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The user's metrics, on the device and empty."""
    for name, metric in metrics.items():
        if not hasattr(metric, "update") or not hasattr(metric, "compute"):
            raise ModelError(f"metric {name!r} is a {type(metric).__name__}; give torchmetrics objects")
        metric.to(device)
        metric.reset()
    return dict(metrics)
