"""Inference over the split: the CPU side sends a dataset, the GPU side sends back what its model makes of it.

Of a classifier: the most likely class and its probability (8 bytes a sample), the most likely few, or the
probabilities of all classes. The softmax is the GPU's work. Models that are no classifiers give their outputs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from distributed_training.feed.client import Client, Transfer
from distributed_training.feed.pairing import PairingLink
from distributed_training.feed.settings import LoaderSettings
from distributed_training.runtime.errors import ConfigError, DataError, ModelError
from distributed_training.split.results import InMemory, Results, Rows, results_for
from distributed_training.split.samples import OnBadSample, Samples
from distributed_training.split.seen import OnProgress, bottleneck
from distributed_training.training.forms import CRITERIA, Answer
from distributed_training.training.trainer import Trainer

_MOST = 1 << 16  # classes that a client may ask for
_REGRESSION = {CRITERIA["mse"], CRITERIA["l1"]}
_REGRESSION_MODULES = (torch.nn.MSELoss, torch.nn.L1Loss, torch.nn.SmoothL1Loss, torch.nn.HuberLoss)


@dataclass(frozen=True)
class Wanted:
    """What a client wants to know of each sample."""

    top_k: int = 1
    full: bool = False

    @property
    def mode(self) -> str:
        """In a word."""
        return "probabilities" if self.full else "top_k" if self.top_k > 1 else "predictions"

    @property
    def facts(self) -> dict[str, Any]:
        """As it is said to the GPU side."""
        return {"top_k": self.top_k, "full": self.full}


class Inference:
    """The GPU side: what is said of a batch."""

    name = "inference"
    need_loss = False

    def __init__(self, trainer: Trainer) -> None:
        criterion = trainer.criterion
        regression = isinstance(criterion, _REGRESSION_MODULES) or criterion in _REGRESSION
        self._classes = trainer.num_classes
        self._regression = regression or trainer.config.training.loss in ("mse", "l1")

    def read(self, facts: Mapping[str, Any]) -> Wanted:
        """What is wanted, as it came over the network."""
        top_k, full = facts.get("top_k"), facts.get("full")
        if type(top_k) is not int or type(full) is not bool or not 1 <= top_k <= _MOST:
            raise ConfigError(f"top_k={top_k!r}, full={full!r}; both sides need the same release")
        return Wanted(top_k, full)

    def check(self, data: Any) -> None:
        """Labels are not looked at."""

    def result(self, answer: Answer, options: Wanted) -> dict[str, Any]:
        """The most likely classes with their probabilities, and all of them if that is wanted; or plain outputs."""
        output = answer.output
        if not isinstance(output, Tensor) or not output.ndim:
            raise ModelError(f"the model's output is a {type(output).__name__}, not one tensor with a row a sample")
        if not self._classifies(output):
            return {"output": output.float() if output.is_floating_point() else output}
        probabilities = F.softmax(output.float(), dim=1)
        best, classes = probabilities.topk(min(options.top_k, output.shape[1]), dim=1)
        result: dict[str, Any] = {"classes": classes.to(torch.int32), "best": best}
        if options.full:
            result["probabilities"] = probabilities
        return result

    def _classifies(self, output: Tensor) -> bool:
        if output.ndim != 2 or output.shape[1] < 2:
            return False
        return output.shape[1] == self._classes if self._classes is not None else not self._regression


def run_inference(
    dataset: Any,
    link: str | PairingLink,
    *,
    batch_size: int = 64,
    num_workers: int = 0,
    top_k: int = 3,
    return_full_probabilities: bool = False,
    confidence_threshold: float = 0.8,
    output: str | Path | None = None,
    on_bad_sample: OnBadSample = "stop",
    settings: LoaderSettings | None = None,
    on_progress: OnProgress | None = None,
) -> dict[str, Any]:
    """Predict with the model of a GPU side for a dataset that is here. Row i of every result is sample i.

    Args:
        dataset: a dataset, arrays, or a DataLoader; labels, if there are any, are not looked at.
        link: the pairing link that the GPU side prints, or host:port on this machine.
        batch_size: samples that travel and are computed together.
        num_workers: loader processes; 0 loads in this one. The order of the results does not depend on it.
        top_k: how many of the most likely classes come back; 1 is the least to travel.
        return_full_probabilities: whether the probabilities of all classes come back, too.
        confidence_threshold: samples pass whose most likely class is at least so likely.
        output: a .npy, .parquet or .csv file that is written while results come: memory is bounded however many
            samples there are, and the result holds no arrays.
        on_bad_sample: when the dataset raises on a sample: `stop` with its id, or `skip` it and say so.
        settings: memory, patience, compression.
        on_progress: called with (samples done, samples in all).

    Returns:
        total_samples; predictions and confidences; top_classes and top_probabilities (samples x top_k) for top_k > 1;
        probabilities (samples x classes) if wanted; passed (samples that pass the threshold) and passed_count;
        skipped (samples left out and why; their class is -1); output (the file); estimated_memory_mb (what the arrays
        take, or would take without `output`); transfer (mode, bytes sent and received, and received per sample);
        seconds, samples_per_second, bottleneck (in words). For a model that is no classifier, predictions are its
        outputs, and confidences None.
    """
    if not 0.0 <= confidence_threshold <= 1.0 or not 1 <= top_k <= _MOST:
        raise ConfigError(f"top_k={top_k}, confidence_threshold={confidence_threshold}: at least 1, and from 0 to 1")
    start = time.perf_counter()
    wanted = Wanted(top_k, return_full_probabilities)
    samples = Samples(dataset, batch_size, num_workers=num_workers, on_bad_sample=on_bad_sample)
    results: Results | None = None
    client, collected = Client(link, Inference.name, wanted.facts, settings), _Collected(confidence_threshold)
    try:
        results = results_for(len(samples), output, samples.dataset.classes)
        for ids, result in client.run(samples):
            rows = collected.rows(len(ids), result)
            if collected.samples == len(ids):
                results.begin(rows)
            results.add(ids, rows)
            if on_progress is not None:
                on_progress(collected.samples, len(samples))
        if not collected.samples:
            raise DataError("no sample of the data could be loaded")
        results.finish()
    except BaseException:
        if results is not None:
            results.abort()
        raise
    finally:
        samples.close()
    seconds = time.perf_counter() - start
    return {
        "total_samples": collected.samples,
        **_arrays(results, wanted),
        "passed_count": collected.passed,
        "confidence_threshold": confidence_threshold,
        "skipped": dict(samples.skipped),
        "output": str(output) if output is not None else None,
        "estimated_memory_mb": collected.row_bytes * len(samples) / 2**20,
        "transfer": _transfer(wanted, client.transfer, collected),
        "seconds": seconds,
        "samples_per_second": collected.samples / seconds,
        "bottleneck": bottleneck(client.seconds, seconds),
    }


class _Collected:
    """Turns what comes back into rows, and counts."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self.samples = self.passed = self.row_bytes = 0
        self.result_bytes = 0

    def rows(self, count: int, result: Mapping[str, Any]) -> Rows:
        """The columns of some samples."""
        arrays = {name: value.numpy() for name, value in result.items() if isinstance(value, Tensor)}
        if not arrays or any(len(array) != count for array in arrays.values()):
            shapes = {name: array.shape for name, array in arrays.items()}
            raise ModelError(f"{count} samples gave results of shape {shapes}; the model must give one row a sample")
        self.result_bytes += sum(array.nbytes for array in arrays.values())
        rows: Rows
        if "output" in arrays:
            rows = {"output": arrays["output"]}
        else:
            classes, best = arrays["classes"], arrays["best"]
            passed = best[:, 0] >= np.float32(self._threshold)
            self.passed += int(passed.sum())
            rows = {"prediction": classes[:, 0], "confidence": best[:, 0], "passed": passed}
            if classes.shape[1] > 1:
                rows |= {"top_classes": classes, "top_probabilities": best}
            if "probabilities" in arrays:
                rows["probabilities"] = arrays["probabilities"]
        self.samples += count
        self.row_bytes = sum(column[:1].nbytes for column in rows.values())
        return rows


def _arrays(results: Results, wanted: Wanted) -> dict[str, Any]:
    """The results by their public names; None for what is not here."""
    columns: Rows = results.columns if isinstance(results, InMemory) else {}
    found = {
        "predictions": columns.get("prediction", columns.get("output")),
        "confidences": columns.get("confidence"),
        "passed": np.flatnonzero(columns["passed"]) if "passed" in columns else None,
    }
    if wanted.top_k > 1:
        found |= {name: columns.get(name) for name in ("top_classes", "top_probabilities")}
    if wanted.full:
        found["probabilities"] = columns.get("probabilities")
    return found


def _transfer(wanted: Wanted, transfer: Transfer, collected: _Collected) -> dict[str, Any]:
    return {
        "mode": wanted.mode,
        "sent": transfer.sent,
        "received": transfer.received,
        "sent_per_sample": transfer.sent / collected.samples,
        "received_per_sample": transfer.received / collected.samples,
        "results": collected.result_bytes,
        "connections": transfer.connections,
    }
