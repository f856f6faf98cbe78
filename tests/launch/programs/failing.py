"""Trains the digits; rank 1 fails once at a step: `failing.py HOW STEP [KEY=VALUE]...`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from distributed_training import Callback, Trainer
from distributed_training.config import load_config
from distributed_training.training.job import build_job


class Fail(Callback):
    """Once: a second attempt finds the mark of the first."""

    def __init__(self, how: str, step: int) -> None:
        self._how, self._step = how, step

    def on_step_end(self, trainer: Trainer, step: int, loss: object) -> None:
        mark = Path("failed-once")
        if trainer.cursor.global_step != self._step or trainer.strategy.rank != 1 or mark.exists():
            return
        mark.touch()
        if self._how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("bad luck")


with build_job(load_config(None, sys.argv[3:])) as job:
    job.trainer.callbacks.append(Fail(sys.argv[1], int(sys.argv[2])))
    result = job.train()
sys.stdout.write(f"{result.status} after {result.steps} steps\n")
