"""Our Trainer. Its data are arrays in host memory, shuffled in plan order: what users give it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from distributed_training.bench.jobs import Job
from distributed_training.bench.loops.base import Pace, PacedBatches, prepare
from distributed_training.bench.turn_worker import Orders
from distributed_training.config import Config
from distributed_training.training import Callback, Trainer
from distributed_training.training.job import build_job

_EPOCHS = 10**6


class Paced(Callback):
    """Tells the pace which step is next. The end of the one before is the last moment before it.

    `tail`: answers have the mean loss of so many steps at the end of a turn.
    """

    def __init__(self, pace: Pace, turn: int, tail: int = 0) -> None:
        self._pace, self._turn, self._tail, self._step = pace, turn, tail, 0
        self._losses: list[Tensor] = []

    def on_train_start(self, trainer: Trainer) -> None:
        self._pace.begin(0)

    def on_step_end(self, trainer: Trainer, step: int, loss: Tensor) -> None:
        self._step += 1
        if self._step > self._turn - self._tail:
            self._losses.append(loss.detach())
        if self._step == self._turn:
            if self._losses:
                self._pace.facts = {"loss": float(sum(self._losses) / len(self._losses))}
            self._step, self._losses = 0, []
        self._pace.begin(self._step)


def run(
    orders: Orders,
    *,
    job: str,
    changes: dict[str, Any],
    device: str,
    threads: int,
    settings: dict[str, Any] | None = None,
    given: str = "arrays",
    losses: int = 0,
) -> None:
    """Train without end: run directory, ledger, guard and logging as always.

    `settings`: of `training`. `losses`: also answer with the mean loss of so many steps at the end of a turn.
    """
    chosen, place = prepare(job, changes, device, threads)
    config = Config.from_dict(
        {
            "training": {
                "schedule": "constant",
                "warmup_epochs": 0,
                "epochs": _EPOCHS,
                "batch_size": chosen.batch_size,
                **(settings or {}),
            },
            "checkpoint": {"every_epochs": 0},
            "run": {"progress": "off"},
        }
    )
    pace = Pace(orders, chosen.warm, chosen.steps, place)
    model = chosen.build().to(place)
    data: Any
    callbacks = []
    if given == "batches":
        data = _Iterable(PacedBatches(chosen.batches(place), pace, chosen))
    else:
        data = _arrays(chosen)
        callbacks = [Paced(pace, chosen.turn, losses)]
    run_dir = orders.folder / "run"
    optimizer = chosen.optimizer(model)
    Trainer(model, optimizer, device=device, config=config, callbacks=callbacks, run_dir=run_dir).train(data)


def run_config(
    orders: Orders, *, config: dict[str, Any], settings: dict[str, Any], warm: int, steps: int, losses: int
) -> None:
    """Train what a config describes without end; `config` makes it a training that ends by itself never."""
    described = Config.from_dict(config, "the config to measure")
    described = described.replace(**{f"training.{key}": value for key, value in settings.items()})
    job = build_job(described, orders.folder / "run")
    pace = Pace(orders, warm, steps, job.trainer.device)
    job.trainer.callbacks.append(Paced(pace, warm + steps + 1, losses))
    job.trainer.train(job.train_data)


class _Iterable:
    """Batches to be taken as they come, and not as samples."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches

    def __iter__(self) -> Any:
        return iter(self._batches)


def _arrays(job: Job) -> Any:
    inputs, targets = job.arrays(job.turn)
    return {"input_ids": inputs, "labels": targets} if job.kind == "tokens" else (inputs, targets)
