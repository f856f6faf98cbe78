"""A training as a user writes it: `horovod_job.py ROOT NAME WHAT [key=value...]`, alone or in every rank.

WHAT happens to the last rank after a few steps: nothing, raises, dies, hangs, is_told_to_stop; or it is_late at first.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
from torch import nn

from distributed_training import Callback, Trainer
from distributed_training.config.load import config_from_layers, parse_override
from distributed_training.runtime.world import read_world

ROOT, NAME, WHAT, *WORDS = sys.argv[1:]
WORLD = read_world()


class Trouble(Callback):
    def on_step_end(self, trainer: Trainer, step: int, loss: torch.Tensor) -> None:
        time.sleep(0.02)  # ranks vote about once a second on whether to stop
        if WORLD.rank == WORLD.size - 1 and trainer.cursor.global_step == 4:
            getattr(self, WHAT)()

    def nothing(self) -> None: ...

    def is_late(self) -> None: ...

    def raises(self) -> None:
        raise ValueError("one sample too many")

    def dies(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def hangs(self) -> None:
        time.sleep(600)

    def is_told_to_stop(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    if WHAT == "is_late" and WORLD.rank:
        time.sleep(600)
    base = {
        "training": {"batch_size": 9, "epochs": 30, "optimizer": "adamw", "log_every": 1, "device": "cpu"},
        "run": {"progress": "off", "root": ROOT, "name": NAME, "deadline": 8 if WHAT in ("hangs", "is_late") else 60},
    }
    config = config_from_layers([("job", base), *(("words", parse_override(word)) for word in WORDS)])
    torch.manual_seed(0)  # the same data everywhere
    inputs = torch.randn(40, 4)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    data = (inputs, inputs[:, :3].argmax(1))
    result = Trainer(model, config=config, callbacks=[Trouble()]).train(data, data)
    sys.stdout.write(f"{result.status} after {result.steps} steps\n")


if __name__ == "__main__":
    main()
