"""Metrics by name: accuracy, F1 and the like over all targets that are judged, and perplexity.

They are counts that every rank adds up by itself and that are summed over ranks at the end, so that the number is that
of one process, however the samples were divided. A mean of the means of batches would not be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from distributed_training.config.check import did_you_mean
from distributed_training.runtime.errors import ConfigError, ModelError
from distributed_training.training.forms import Answer
from distributed_training.training.judged import Judged

PERPLEXITY = "perplexity"


class Accuracy:
    """The share of targets that were predicted, with the face of a torchmetric.

    The one metric that nearly every run has, and importing torchmetrics takes seconds where transformers is installed.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._counts = torch.zeros(2, dtype=torch.int64, device=device)
        """Predicted rightly, and all."""

    def to(self, device: torch.device | str) -> Accuracy:
        """The same, counting on a device."""
        self._counts = self._counts.to(device)
        return self

    def update(self, predicted: Tensor, targets: Tensor) -> None:
        """Count a batch of class numbers."""
        self._counts[0] += (predicted == targets).sum()
        self._counts[1] += targets.numel()

    def sum_over(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """Let a strategy put the counts of all ranks together."""
        self._counts = reduce(self._counts)

    def compute(self) -> Tensor:
        """In float32, as torchmetrics divides."""
        return self._counts[0] / self._counts[1]

    def reset(self) -> None:
        """Forget what was counted."""
        self._counts = torch.zeros_like(self._counts)


def _averaged(kind: str, average: str | None = None) -> Callable[[int], Any]:
    """F1, precision or recall. Without an average named: of class 1 where there are two, else the mean over classes."""

    def make(classes: int) -> Any:
        from torchmetrics import classification

        if average is None and classes == 2:
            return getattr(classification, f"Binary{kind}")(validate_args=False)
        return getattr(classification, f"Multiclass{kind}")(classes, average=average or "macro", validate_args=False)

    return make


METRICS: dict[str, Callable[[int], Any]] = {
    "accuracy": lambda classes: Accuracy(),
    "f1": _averaged("F1Score"),
    "f1_macro": _averaged("F1Score", "macro"),
    "f1_micro": _averaged("F1Score", "micro"),
    "f1_weighted": _averaged("F1Score", "weighted"),
    "precision": _averaged("Precision"),
    "recall": _averaged("Recall"),
}


class NamedMetrics:
    """The metrics that a model's answers allow, or those asked for."""

    def __init__(self, names: Sequence[str] | None, answer: Answer, judged: Judged, device: torch.device) -> None:
        classes = scored_classes(answer)
        if names is None:
            names = [] if classes is None else [PERPLEXITY] if judged.shifted else ["accuracy"]
        self._judged = judged
        self.perplexity = PERPLEXITY in names
        self.counts: dict[str, Any] = {}
        """Accuracy, and those of torchmetrics, by name."""
        for name in names:
            if name == PERPLEXITY:
                continue
            if name not in METRICS:
                known = [*METRICS, PERPLEXITY]
                raise ConfigError(f"metric {name!r} is none of {', '.join(known)}{did_you_mean(name, known)}")
            if classes is None:
                raise ModelError(
                    f"metric {name!r} compares classes, but the model's outputs are not scores of classes for whole-"
                    "number targets; give torchmetrics objects for others"
                )
            self.counts[name] = METRICS[name](classes).to(device)

    def update(self, answer: Answer) -> None:
        """Count what the model said of a batch."""
        if not self.counts:
            return
        scores, targets = self._judged.pairs(answer.output, answer.targets)
        if len(targets):
            predicted = scores.argmax(-1)
            for metric in self.counts.values():
                metric.update(predicted, targets)

    def of_loss(self, loss: float) -> dict[str, float]:
        """What follows from the mean loss over all judged targets."""
        if not self.perplexity:
            return {}
        return {PERPLEXITY: math.exp(loss) if loss < 700 else math.inf}


def scored_classes(answer: Answer) -> int | None:
    """Number of classes where the model gave one score a class for each sample's label, or for each token's."""
    output, targets = answer.output, answer.targets
    if not isinstance(output, Tensor) or not isinstance(targets, Tensor) or answer.name == "reconstruction":
        return None
    whole_numbers = not targets.is_floating_point() and not targets.is_complex() and targets.dtype != torch.bool
    of_samples = output.ndim == 2 and targets.ndim == 1
    of_tokens = output.ndim == 3 and output.shape[:-1] == targets.shape
    if not whole_numbers or not (of_samples or of_tokens) or output.shape[-1] < 2:
        return None
    return int(output.shape[-1])
