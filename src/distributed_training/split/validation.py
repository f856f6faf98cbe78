"""Validation over the split: the CPU side sends a dataset, the GPU side says how well its model does on it.

For each batch the GPU side sends back the mean loss and, of a classifier, which class each sample was taken for. The
CPU side adds up, in the order of the dataset: the numbers are those that the same evaluation gives in one process.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distributed_training.feed.client import Client
from distributed_training.feed.pairing import PairingLink
from distributed_training.feed.settings import LoaderSettings
from distributed_training.runtime.errors import DataError
from distributed_training.split.samples import OnBadSample, Samples
from distributed_training.split.seen import OnProgress, bottleneck
from distributed_training.training.evaluation import classes_of
from distributed_training.training.forms import TARGET_KEYS, Answer
from distributed_training.training.trainer import Trainer

_IGNORED = -100  # a target that cross entropy does not count
_MATRIX = 2048  # classes up to which there is a confusion matrix: it has so many rows and columns


class Validation:
    """The GPU side: what is said of a batch."""

    name = "validation"
    need_loss = True

    def __init__(self, trainer: Trainer) -> None:
        self._classes = trainer.num_classes if trainer.device.type != "cpu" else None

    def read(self, facts: Mapping[str, Any]) -> None:
        """There is nothing to choose."""

    def check(self, data: Any) -> None:
        """A label that is no class would put a GPU out of order, for all clients: so it does not get there."""
        if isinstance(data, (tuple, list)):
            targets = data[1] if len(data) > 1 else None
        else:
            found = data if isinstance(data, Mapping) else {}
            targets = next((found[key] for key in TARGET_KEYS if key in found), None)
        if self._classes is None or not isinstance(targets, Tensor) or targets.is_floating_point():
            return
        wrong = targets[(targets >= self._classes) | ((targets < 0) & (targets != _IGNORED))]
        if targets.ndim == 1 and len(wrong):
            raise DataError(
                f"a sample has the label {int(wrong[0])}, and the model knows the classes 0 to {self._classes - 1}"
            )

    def result(self, answer: Answer, options: None) -> dict[str, Any]:
        """The mean loss, and of a classifier the class of each sample and the one it was taken for."""
        assert answer.loss is not None
        result: dict[str, Any] = {"loss": answer.loss.double()}
        classes = classes_of(answer)
        if classes is not None:
            result["classes"] = classes
            result["predicted"] = answer.output.argmax(1).to(torch.int32)
            result["target"] = answer.targets.to(torch.int32)
        return result


def run_validation(
    dataset: Any,
    link: str | PairingLink,
    *,
    batch_size: int = 64,
    num_workers: int = 0,
    on_bad_sample: OnBadSample = "stop",
    settings: LoaderSettings | None = None,
    on_progress: OnProgress | None = None,
) -> dict[str, Any]:
    """Validate the model of a GPU side on a dataset that is here.

    Args:
        dataset: a dataset, arrays, or a DataLoader of `(inputs, targets)` or dicts.
        link: the pairing link that the GPU side prints, or host:port on this machine.
        batch_size: samples that travel and are computed together.
        num_workers: loader processes; 0 loads in this one.
        on_bad_sample: when the dataset raises on a sample: `stop` with its id, or `skip` it and say so.
        settings: memory, patience, compression.
        on_progress: called with (samples done, samples in all).

    Returns:
        accuracy, average_loss, per_class (by name: samples, correct, accuracy, precision, recall, f1),
        confusion_matrix (rows are true classes, columns predicted ones), total_samples, skipped (samples left out and
        why), seconds, samples_per_second, bytes_sent, bytes_received, bottleneck (in words). What makes
        sense only for a classifier is None for other models.
    """
    start = time.perf_counter()
    samples = Samples(dataset, batch_size, num_workers=num_workers, on_bad_sample=on_bad_sample)
    client, tally = Client(link, Validation.name, {}, settings), _Tally()
    try:
        for ids, result in client.run(samples):
            tally.add(len(ids), result)
            if on_progress is not None:
                on_progress(tally.samples, len(samples))
    finally:
        samples.close()
    seconds = time.perf_counter() - start
    return {
        **tally.values(samples.dataset.classes),
        "total_samples": tally.samples,
        "skipped": dict(samples.skipped),
        "seconds": seconds,
        "samples_per_second": tally.samples / seconds,
        "bytes_sent": client.transfer.sent,
        "bytes_received": client.transfer.received,
        "bottleneck": bottleneck(client.seconds, seconds),
    }


class _Tally:
    """Adds up what comes back, in memory that does not grow with the number of samples."""

    def __init__(self) -> None:
        self.samples = 0
        self._loss = 0.0
        self._classes: int | None = None
        self._labelled = self._correct = 0
        self._matrix: np.ndarray | None = None

    def add(self, samples: int, result: Mapping[str, Any]) -> None:
        """What was said of a batch."""
        self._loss += float(result["loss"]) * samples
        self.samples += samples
        if "classes" in result:
            self._count(int(result["classes"]), result["predicted"].long(), result["target"].long())

    def _count(self, classes: int, predicted: Tensor, target: Tensor) -> None:
        if self._classes is None:
            self._classes = classes
            self._counts = np.zeros((3, classes), np.int64)  # of each class: samples, predictions, correct ones
            self._matrix = np.zeros((classes, classes), np.int64) if classes <= _MATRIX else None
        self._labelled += len(target)
        self._correct += int((predicted == target).sum())
        known = (target >= 0) & (target < classes)  # targets that say "ignore" are no class
        of, said = target[known].numpy(), predicted[known].numpy()
        for row, values in enumerate((of, said, of[of == said])):
            self._counts[row] += np.bincount(values, minlength=classes)
        if self._matrix is not None:
            self._matrix += np.bincount(of * classes + said, minlength=classes**2).reshape(classes, classes)

    def values(self, names: list[str] | None) -> dict[str, Any]:
        """The result of all."""
        if not self.samples:
            raise DataError("no sample of the validation data could be loaded")
        values: dict[str, Any] = {"accuracy": None, "average_loss": self._loss / self.samples, "per_class": None}
        if self._classes is not None:
            # In float32, as torchmetrics divides: the number is that of an evaluation in one process. To import
            # torchmetrics for it would take seconds.
            values["accuracy"] = float(torch.tensor(self._correct) / torch.tensor(self._labelled))
            values["per_class"] = self._per_class(names)
        return {**values, "confusion_matrix": self._matrix}

    def _per_class(self, names: list[str] | None) -> dict[str, dict[str, float]]:
        assert self._classes is not None
        if names is None or len(names) != self._classes:
            names = [str(number) for number in range(self._classes)]
        result = {}
        for name, (samples, predicted, correct) in zip(names, self._counts.T.tolist()):
            recall = correct / samples if samples else 0.0
            precision = correct / predicted if predicted else 0.0
            f1 = 2 * precision * recall / (precision + recall) if correct else 0.0
            result[name] = {
                "samples": samples,
                "correct": correct,
                "accuracy": recall,
                "precision": precision,
                "recall": recall,
                "f1": f1,
            }
        return result
