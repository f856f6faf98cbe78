"""Training on batches that loader processes send, beside the same training on data in memory.

`run` is the process of one source, for `TurnProcess`: it trains without end, one turn after another, so that what is
done once (recording steps, compiling kernels) is done once. Loaders are forked before anything here has a thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from distributed_training.bench.jobs import Job
from distributed_training.bench.loops.base import prepare
from distributed_training.bench.transport.ours import fed
from distributed_training.bench.turn_worker import Orders
from distributed_training.config import Config
from distributed_training.data import ArrayDataset, Loader, Plan
from distributed_training.data.base import BatchSource
from distributed_training.feed import FeedServer
from distributed_training.feed.figures import Figures
from distributed_training.training import Callback, Trainer

SOURCES = ("in-memory", "resident", "split", "split-tcp")
"""Where batches come from: arrays in this process, arrays on the GPU, a loader by shared memory, a loader by TCP."""
_NUMBERS = 2**26  # that a dataset holds at most, unless that were too few batches
_BATCHES = 64  # of large samples: with few, epochs end more often than in any training


class FedTurns(Callback):
    """Lets a training run one turn at a time, and takes the time of its steps and how long it waited for the feed.

    While a training waits for its turn its loaders work ahead. So many steps are not measured, or the feed would be
    seen faster than it is.
    """

    def __init__(self, orders: Orders, job: Job, figures: Callable[[], Figures]) -> None:
        self._orders, self._job, self._figures = orders, job, figures

    def on_train_start(self, trainer: Trainer) -> None:
        self._begin()

    def _begin(self) -> None:
        self._step, self._first = 0, self._job.warm + self._figures().horizon

    def on_step_end(self, trainer: Trainer, step: int, loss: torch.Tensor) -> None:
        self._step += 1
        if self._step == self._first:
            self._clock, self._before = self._now(loss), self._figures()
        elif self._step == self._first + self._job.steps:
            seconds = (self._now(loss) - self._clock) / self._job.steps
            waited = self._figures().since(self._before).wait_share
            self._orders.answer(seconds=seconds, wait_share=waited)
            self._orders.wait_or_end()
            self._begin()

    @staticmethod
    def _now(loss: torch.Tensor) -> float:
        if loss.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


def run(
    orders: Orders, *, job: str, changes: dict[str, Any], source: str, device: str, workers: int, threads: int
) -> None:
    """Train without end on batches from one of SOURCES."""
    chosen, _ = prepare(job, changes, device, threads)
    dataset = made_up(chosen)
    plan = Plan(len(dataset), chosen.batch_size, 0)
    with ExitStack() as stack:
        server: FeedServer | None = None
        if source.startswith("split"):
            server = stack.enter_context(fed(dataset, plan, workers, shared=source == "split"))
        batches = server.source() if server is not None else _local(source, dataset, plan, device)
        _train(chosen, batches, device, FedTurns(orders, chosen, server.figures if server is not None else Figures))


def made_up(job: Job) -> ArrayDataset:
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
    return Loader(dataset, plan, pin_memory=device == "cuda", resident="on" if source == "resident" else "off")


def _train(job: Job, batches: BatchSource, device: str, turns: FedTurns) -> None:
    training = {"schedule": "constant", "warmup_epochs": 0, "batch_size": job.batch_size, "epochs": 10**6}
    config = Config.from_dict({"training": training, "run": {"progress": "off"}})
    trainer = Trainer(job.build(), device=device, config=config, callbacks=[turns], run_dir=False)
    trainer.train(batches)
