"""Evaluation and prediction: every sample once, in the dataset's order, without gradients."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
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

Metrics = Mapping[str, Any]


def evaluate(engine: Engine, source: BatchSource, metrics: Metrics | None) -> dict[str, float]:
    """Mean loss over all samples and torchmetrics (accuracy for classifiers, unless others are given).

    Ranks share the samples of each batch, and their sums are put together at the end: as exact as one process.
    """
    strategy = engine.strategy
    total = torch.zeros((), device=strategy.device, dtype=torch.float64)
    samples = 0
    chosen: dict[str, Any] | None = None
    with evaluating(engine.model):
        for answer, batch in _answers(engine, source, need_loss=True):
            assert answer.loss is not None
            if chosen is None:
                chosen = _start(metrics, answer, strategy.device)
            if batch.padding:  # another rank's sample: run for its part in the exchange, not counted
                continue
            total += answer.loss.double() * batch.size
            samples += batch.size
            for metric in chosen.values():
                metric.update(answer.output, answer.targets)
    shared = source.share.ranks > 1
    if shared:
        total, samples = strategy.reduce(total), int(strategy.reduce(torch.tensor(samples, device=strategy.device)))
    if not samples:
        raise DataError("the validation data is empty")
    values = {"loss": float(total) / samples}
    for metric in (chosen or {}).values():
        _put_together(metric, strategy if shared else None)
    for name, metric in (chosen or {}).items():
        values |= _numbers(name, metric.compute())
        metric.reset()
    return values


def _put_together(metric: Any, strategy: Strategy | None) -> None:
    """Let a torchmetric sum over all ranks through the strategy when it is computed; with None, not at all."""
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
        for answer, batch in _answers(engine, source, need_loss=False):
            output = answer.output
            if source.share.ranks > 1:
                output = gather_rows(engine.strategy, output, batch)
            outputs.append(map_tensors(lambda t: t.float().cpu() if t.is_floating_point() else t.cpu(), output))
    if outputs and all(isinstance(output, Tensor) for output in outputs):
        return torch.cat(outputs)
    return outputs


def _answers(engine: Engine, source: BatchSource, *, need_loss: bool) -> Iterator[tuple[Answer, Batch]]:
    for _, batch in source.batches(0):
        with engine.autocast:
            answer = engine.answer(engine.place(batch), need_loss=need_loss)
        yield answer, batch


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


def _start(metrics: Metrics | None, answer: Answer, device: torch.device) -> dict[str, Any]:
    """The metrics to compute, on the device and empty."""
    if metrics is None:
        metrics = {}
        classes = classes_of(answer)
        if classes is not None:
            from torchmetrics.classification import MulticlassAccuracy

            metrics = {"accuracy": MulticlassAccuracy(classes, average="micro", validate_args=False)}
    for name, metric in metrics.items():
        if not hasattr(metric, "update") or not hasattr(metric, "compute"):
            raise ModelError(f"metric {name!r} is a {type(metric).__name__}; give torchmetrics objects")
        metric.to(device)
        metric.reset()
    return dict(metrics)
