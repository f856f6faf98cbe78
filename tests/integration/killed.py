"""Trains the digits until it kills itself: `killed.py STEP [KEY=VALUE]...`."""

from __future__ import annotations

import os
import signal
import sys

from distributed_training import Callback, Trainer
from distributed_training.config import load_config
from distributed_training.training.job import build_job


class Kill(Callback):
    def on_step_end(self, trainer: Trainer, step: int, loss: object) -> None:
        if trainer.cursor.global_step == int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)


with build_job(load_config(None, sys.argv[2:])) as job:
    job.trainer.callbacks.append(Kill())
    job.train()
