"""Trains the digits; in its first life rank 1 stands still at a step: `waiting.py STEP [KEY=VALUE]...`.

The file `standing` then has the number of its process.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from distributed_training import Callback, Trainer
from distributed_training.config import load_config
from distributed_training.training.job import build_job


class Stand(Callback):
    """Once: a second life finds the file of the first."""

    def on_step_end(self, trainer: Trainer, step: int, loss: object) -> None:
        mark = Path("standing")
        if trainer.cursor.global_step == int(sys.argv[1]) and trainer.strategy.rank == 1 and not mark.exists():
            Path("standing.part").write_text(str(os.getpid()))
            Path("standing.part").rename(mark)
            time.sleep(300)


with build_job(load_config(None, sys.argv[2:])) as job:
    job.trainer.callbacks.append(Stand())
    result = job.train()
    world = job.trainer.strategy.world_size
sys.stdout.write(f"{result.status} after {result.steps} steps on {world} ranks\n")
