"""A small training in which one rank gets into trouble: `trouble.py KIND RANK [key=value ...]`."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

from distributed_training import Callback, Config, Trainer
from distributed_training.runtime.errors import DataError

KIND, WHO = sys.argv[1], int(sys.argv[2])
SETTINGS = dict(word.split("=", 1) for word in sys.argv[3:])
RANK = int(os.environ["RANK"])
TROUBLED, STEP = RANK == WHO, 3


class OwnError(Exception):
    """Of the user's code."""


def raise_memory_error() -> None:
    raise MemoryError("no more")


def raise_device_error() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def raise_own_error() -> None:
    raise OwnError("the user's own mistake")


def raise_network_error() -> None:
    raise ConnectionResetError("Connection reset by peer")


def sleep_without_python() -> None:
    ctypes.CDLL(None).sleep(1000)


def sleep_and_keep_python() -> None:
    ctypes.PyDLL(None).sleep(1000)


IN_CALLBACK = {
    "error": raise_own_error,
    "error-closed": raise_own_error,
    "network": raise_network_error,
    "memory": raise_memory_error,
    "device-memory": raise_device_error,
    "hang": lambda: time.sleep(1000),
    "hang-in-c": sleep_without_python,
    "keep-python": sleep_and_keep_python,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "leave": lambda: sys.exit(0),
    "slow": lambda: time.sleep(float(SETTINGS["slow"])),
}


class Trouble(Callback):
    def on_step_end(self, trainer: Trainer, step: int, loss: Tensor) -> None:
        sys.stdout.write(f"rank {RANK} has done step {trainer.cursor.global_step}\n")
        sys.stdout.flush()
        if TROUBLED and trainer.cursor.global_step == STEP and KIND in IN_CALLBACK:
            IN_CALLBACK[KIND]()
        time.sleep(float(SETTINGS.get("pace", 0)))


class Data(Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, at: int) -> tuple[Tensor, int]:
        if "workers" in SETTINGS and get_worker_info() is not None:
            sys.stdout.write(f"loader process {os.getpid()}\n")
            sys.stdout.flush()
        if TROUBLED and at >= 40:
            self.trouble(at)
        return torch.full((6,), float("nan") if KIND == "nan" and at == 41 else at / 64), at % 3

    def trouble(self, at: int) -> None:
        if KIND == "error-in-data":
            raise_own_error()
        if KIND == "bad-sample":
            raise DataError(f"sample {at} cannot be read")
        if KIND == "hang-in-data" or (KIND == "hang-in-loader" and get_worker_info() is not None):
            time.sleep(1000)


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


def main() -> None:
    settings = {
        "run.progress": "off",
        "run.deadline": float(SETTINGS.get("deadline", 6)),
        "run.name": SETTINGS.get("name"),
        "checkpoint.resume": SETTINGS.get("resume", "never"),
        "checkpoint.every_steps": int(SETTINGS["save"]) if "save" in SETTINGS else None,
        "training.device": "cpu",
        "training.log_every": 1,
        "training.batch_size": 8,
        "training.gradient_accumulation": int(SETTINGS.get("parts", 1)),
        "training.lr": 0.05 if not (KIND == "other-config" and TROUBLED) else 0.06,
        "strategy.name": "ddp",
    }
    torch.manual_seed(0)
    model = Model(9 if KIND == "other-model" and TROUBLED else 8)
    workers = 2 if KIND == "hang-in-loader" else int(SETTINGS.get("workers", 0))
    data: Any = DataLoader(Data(), batch_size=8, num_workers=workers)
    if KIND == "other-data" and TROUBLED:
        data = (torch.ones(64, 6), torch.zeros(64, dtype=torch.long))
    run_dir = None if "name" in SETTINGS else False
    trainer = Trainer(model, config=Config().replace(**settings), callbacks=[Trouble()], run_dir=run_dir)
    try:
        result = trainer.train(data, epochs=int(SETTINGS.get("epochs", 2)))
    finally:
        if KIND == "error-closed":
            trainer.close()
    sys.stdout.write(f"rank {RANK} {result.status} after {result.steps} steps, {result.skipped_steps} skipped\n")
    if result.status == "interrupted":
        sys.exit(143)


main()
