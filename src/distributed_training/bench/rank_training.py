"""What every rank of a measured job runs, for `TurnProcess`.

It trains as `dtrain train` does, with one callback more: between two steps it waits for its turn, and in its turn it
takes the time, or looks at memory and traffic.
"""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from distributed_training.bench import traffic
from distributed_training.bench.turn_worker import Orders, room
from distributed_training.config import Config
from distributed_training.config.load import literal
from distributed_training.data import ArrayDataset
from distributed_training.data.base import Splits
from distributed_training.runtime.allocator import keep_freed_memory, return_freed_memory
from distributed_training.runtime.device import choose_device
from distributed_training.runtime.meters import Meter, meter_for
from distributed_training.runtime.world import read_world
from distributed_training.training import Callback
from distributed_training.training.job import build_job, load_data

if TYPE_CHECKING:
    from distributed_training.training import Trainer

_WARM = 2  # steps at the beginning of a turn that are not measured
_MEMORY = {"kind": "memory", "steps": 3, "warm": 3}
_SHORT = {"steps": 3}  # enough to tell how many steps make a turn


def run(orders: Orders, *, config: dict[str, Any], memory: bool) -> None:
    """Train until there are no more orders.

    Set-up ends with a short turn, and begins with one for `memory` where that is wanted: what is kept while time is
    measured would be used again, and look as if it were needed.
    """
    described = Config.from_dict(literal(config))
    data = load_data(described)
    if described.data.dataset == "synthetic":
        data = _in_memory(data)
    device = choose_device(described.training.device, read_world().local_rank)
    if device.type == "cpu":
        _rehearse(described, data)
    meter = meter_for(device)
    with build_job(described, run_dir=False, data=data) as job:
        job.trainer.callbacks.append(TakesTurns(orders, meter, [_MEMORY, _SHORT] if memory else [_SHORT]))
        job.trainer.train(job.train_data)


def _rehearse(config: Config, data: Splits) -> None:
    """A step of the same training: what libraries load by then, and keep for good, is no memory of the training."""
    return_freed_memory()
    # By default it would be kept to be fast, and not be seen when the same training needs it again.
    with build_job(config.replace(**{"run.allocator": "default"}), run_dir=False, data=data) as job:
        job.trainer.callbacks.append(_OneStep())
        job.trainer.train(job.train_data)
    gc.collect()
    return_freed_memory()


class _OneStep(Callback):
    """Stops after the first step."""

    def on_step_end(self, trainer: Trainer, step: int, loss: Tensor) -> None:
        trainer.stop("rehearsed")


def _in_memory(data: Splits) -> Splits:
    """Samples that are computed anew each time, kept: what is to be measured is the training."""
    rows = data.train.fetch(np.arange(len(data.train)))
    return Splits(ArrayDataset(rows, num_classes=data.train.num_classes, name="synthetic"), None)


class TakesTurns(Callback):
    """Waits between steps for an order, and does what it says in the steps after it.

    `first` are orders that it has from the beginning; what came of all of them is one answer.
    """

    def __init__(self, orders: Orders, meter: Meter, first: list[dict[str, Any]]) -> None:
        self._orders, self._meter, self._first = orders, meter, first
        self._order: dict[str, Any] | None = None
        self._found: dict[str, Any] = {}
        self._step, self._began = 0, 0.0
        self._sent: dict[int, int] = {}

    def on_train_start(self, trainer: Trainer) -> None:
        self._found["parameters"] = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
        self._next(trainer)

    def on_step_end(self, trainer: Trainer, step: int, loss: Tensor) -> None:
        order = self._order
        if order is None:  # told to stop: what is left are steps until all ranks have agreed on it
            return
        self._step += 1
        if self._step == order["warm"]:
            self._begin(trainer, order)
        if self._step == order["warm"] + order["steps"]:
            self._end(trainer, order)
            self._next(trainer)

    def _next(self, trainer: Trainer) -> None:
        """Wait for the next order. There is none when whoever gives them is gone."""
        if self._first:
            given: dict[str, Any] | None = self._first.pop(0)
        else:
            self._orders.answer(**self._found, **room(trainer.device, trainer.strategy.world_size))
            self._found = {}
            given = self._orders.wait()
        self._step = 0
        if given is None:
            self._order = None
            trainer.stop("measured")
            return
        self._order = {"kind": "time", "warm": _WARM, **given}
        if self._order["kind"] == "memory" and trainer.device.type == "cpu":
            return_freed_memory()
        elif trainer.device.type == "cpu" and trainer.config.run.allocator == "auto":
            keep_freed_memory()
        trainer.strategy.barrier()

    def _begin(self, trainer: Trainer, order: dict[str, Any]) -> None:
        _wait_for(trainer)
        if order["kind"] == "memory":
            self._sent = traffic.sent_bytes()
            self._meter.peak()  # forgets what was before
        self._began = time.perf_counter()

    def _end(self, trainer: Trainer, order: dict[str, Any]) -> None:
        _wait_for(trainer)
        self._found["seconds"] = (time.perf_counter() - self._began) / order["steps"]
        if order["kind"] == "memory":
            sent = traffic.difference(self._sent, traffic.sent_bytes())
            self._found |= {"peak": self._meter.peak(), "sent": sent / order["steps"]}


def _wait_for(trainer: Trainer) -> None:
    if trainer.device.type == "cuda":
        torch.cuda.synchronize(trainer.device)
