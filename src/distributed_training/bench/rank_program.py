"""What every rank of a measured job runs: `python -m distributed_training.bench.rank_program FOLDER`.

It trains as `dtrain train` does, with one callback more: between two steps it waits for its turn, and in its turn it
takes the time, or looks at memory and traffic. `FOLDER/job.json` says what to train; orders come through a pipe for
each rank, answers go into files.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from distributed_training.runtime.threads import keep_waits_short

if __name__ == "__main__":
    keep_waits_short()  # before torch is imported

import numpy as np
import torch
from torch import Tensor

from distributed_training.bench import traffic
from distributed_training.config import Config
from distributed_training.config.load import literal
from distributed_training.data import ArrayDataset
from distributed_training.data.base import Splits
from distributed_training.runtime.allocator import keep_freed_memory, return_freed_memory
from distributed_training.runtime.device import choose_device
from distributed_training.runtime.meters import Meter, meter_for, resident
from distributed_training.runtime.world import read_world
from distributed_training.training import Callback
from distributed_training.training.job import build_job, load_data

if TYPE_CHECKING:
    from distributed_training.training import Trainer


def main(folder: Path) -> None:
    """Train until there are no more orders."""
    task = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    config = Config.from_dict(literal(task["config"]))
    data = load_data(config)
    if task["in_memory"]:
        data = _in_memory(data)
    device = choose_device(config.training.device, read_world().local_rank)
    if device.type == "cpu":
        _rehearse(config, data)
    meter = meter_for(device)
    with build_job(config, run_dir=False, data=data) as job:
        job.trainer.callbacks.append(TakesTurns(folder, meter))
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
    """Waits between steps for an order, and does what it says in the steps after it."""

    def __init__(self, folder: Path, meter: Meter) -> None:
        self._folder, self._meter = folder, meter
        self._orders: IO[str]
        self._order: dict[str, Any] | None = None
        self._number = self._step = 0
        self._began = 0.0
        self._sent: dict[int, int] = {}

    def on_train_start(self, trainer: Trainer) -> None:
        parameters = [p for p in trainer.model.parameters() if p.requires_grad]
        self._orders = (self._folder / f"orders-{trainer.strategy.rank}").open(encoding="utf-8")
        facts = {"ranks": trainer.strategy.world_size, "parameters": sum(p.numel() for p in parameters)}
        self._answer(trainer, {**facts, "device": str(trainer.device), "threads": torch.get_num_threads()})
        self._next(trainer)

    def on_step_end(self, trainer: Trainer, step: int, loss: Tensor) -> None:
        order = self._order
        if order is None:  # told to stop: what is left are steps until all ranks have agreed on it
            return
        self._step += 1
        if self._step == order["warm"]:
            self._begin(trainer, order)
        if self._step == order["warm"] + order["steps"]:
            self._answer(trainer, self._found(trainer, order))
            self._next(trainer)

    def _next(self, trainer: Trainer) -> None:
        """Wait for the next order. There is none when whoever gives them is gone."""
        line = self._orders.readline()
        self._order = json.loads(line) if line else None
        self._step = 0
        if self._order is None:
            trainer.stop("measured")
            return
        if self._order["kind"] == "memory" and trainer.device.type == "cpu":
            return_freed_memory()
        elif trainer.device.type == "cpu" and trainer.config.run.allocator == "auto":
            keep_freed_memory()
        trainer.strategy.barrier()
        if self._order["warm"] == 0:
            self._begin(trainer, self._order)

    def _begin(self, trainer: Trainer, order: dict[str, Any]) -> None:
        _wait_for(trainer)
        if order["kind"] == "memory":
            self._sent = traffic.sent_bytes()
            self._meter.peak()  # forgets what was before
        self._began = time.perf_counter()

    def _found(self, trainer: Trainer, order: dict[str, Any]) -> dict[str, Any]:
        _wait_for(trainer)
        found: dict[str, Any] = {"seconds": time.perf_counter() - self._began, "steps": order["steps"]}
        found["resident"] = resident()
        if order["kind"] == "memory":
            peak, sent = self._meter.peak(), traffic.difference(self._sent, traffic.sent_bytes())
            found |= {"peak": peak, "sent": sent / order["steps"]}
        return found

    def _answer(self, trainer: Trainer, found: dict[str, Any]) -> None:
        file = self._folder / f"answer-{self._number}-{trainer.strategy.rank}.json"
        part = file.with_suffix(".part")
        part.write_text(json.dumps(found), encoding="utf-8")
        os.replace(part, file)
        self._number += 1


def _wait_for(trainer: Trainer) -> None:
    if trainer.device.type == "cuda":
        torch.cuda.synchronize(trainer.device)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
