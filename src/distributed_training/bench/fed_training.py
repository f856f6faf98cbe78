"""Training on batches that loader processes send, beside the same training on data in memory.

`turn` is one measurement, for `forked_turns`: the loader is forked before anything here has started a thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from distributed_training.bench.jobs import JOBS, Job
from distributed_training.bench.transport.ours import fed
from distributed_training.config import Config
from distributed_training.data import ArrayDataset, Loader, Plan
from distributed_training.data.base import BatchSource
from distributed_training.feed import FeedServer
from distributed_training.training import Callback, Trainer

SOURCES = ("in-memory", "resident", "split", "split-tcp")
"""Where batches come from: arrays in this process, batches on the GPU, a loader by shared memory, a loader by TCP."""
_NUMBERS = 2**26  # that a dataset holds at most, unless that were too few batches
_BATCHES = 16


class Clock(Callback):
    """Time from the end of one step to the end of another, the device's work included."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self.seconds = 0.0

    def on_step_end(self, trainer: Trainer, step: int, loss: torch.Tensor) -> None:
        at = trainer.cursor.global_step
        if at in (self.first, self.last):
            if loss.is_cuda:
                torch.cuda.synchronize()
            if at == self.first:
                self._start = time.perf_counter()
            else:
                self.seconds = time.perf_counter() - self._start
                trainer.stop("measured")


class Resident(Loader):
    """Batches that are on the GPU before training begins: what a step costs without any loading at all."""

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """The same batches every epoch, copied once."""
        if not hasattr(self, "_kept"):
            self._kept = list(super().batches(0, 0))
            for _, batch in self._kept:
                batch.data = tuple([tensor.cuda() for tensor in batch.data])
        return iter(self._kept[start:])


def turn(*, job: str, changes: dict[str, Any], source: str, device: str, workers: int) -> dict[str, float]:
    """Seconds a step from one of SOURCES, and the share of the time that training waited for the split."""
    chosen = replace(JOBS[job], **changes)
    torch.set_num_threads(chosen.threads or 1)  # on a CPU the loader has the other core
    dataset = _dataset(chosen)
    plan = Plan(len(dataset), chosen.batch_size, 0)
    with ExitStack() as stack:
        server: FeedServer | None = None
        if source.startswith("split"):
            server = stack.enter_context(fed(dataset, plan, workers, shared=source == "split"))
        batches = server.source() if server is not None else _local(source, dataset, plan, device)
        seconds = _train(chosen, batches, device)
        waited = server.figures().wait_share if server is not None else 0.0
    return {"seconds": seconds, "wait_share": waited}


def _dataset(job: Job) -> ArrayDataset:
    """Made-up samples: vectors of floats, or images of bytes as they are stored."""
    numbers = np.random.default_rng(0)
    samples = max(_BATCHES * job.batch_size, min(16384, _NUMBERS // int(np.prod(job.shape))))
    inputs: np.ndarray
    if job.kind == "images":
        inputs = numbers.integers(0, 256, (samples, *job.shape), dtype=np.uint8)
    else:
        inputs = numbers.standard_normal((samples, *job.shape), dtype=np.float32)
    return ArrayDataset((inputs, numbers.integers(0, job.classes, samples)), num_classes=job.classes, name="benchmark")


def _local(source: str, dataset: ArrayDataset, plan: Plan, device: str) -> BatchSource:
    kind = Resident if source == "resident" else Loader
    return kind(dataset, plan, pin_memory=device == "cuda")


def _train(job: Job, batches: BatchSource, device: str) -> float:
    clock = Clock(job.warm, job.warm + job.steps)
    training = {"schedule": "constant", "warmup_epochs": 0, "batch_size": job.batch_size}
    config = Config.from_dict({"training": training, "run": {"progress": "off"}})
    trainer = Trainer(job.build(), device=device, config=config, callbacks=[clock], run_dir=False)
    trainer.train(batches, epochs=10**6)
    trainer.close()
    return clock.seconds / job.steps
