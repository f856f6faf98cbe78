"""Saving and loading a state of some size: ours, torch.save, and a plain write of as many bytes.

`run` is the process of all variants, for `TurnProcess`: buffers that a training keeps from save to save are kept here.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distributed_training.bench.turn_worker import Orders
from distributed_training.checkpoint import CheckpointStore
from distributed_training.config import CheckpointConfig
from distributed_training.runtime.errors import BenchError

_PIECE = 8 << 20  # bytes of one write
_TENSORS = 16


def run(orders: Orders, *, folder: str, megabytes: int, device: str, timeout: float) -> None:
    """Answer each order `{"way": ...}` with the seconds it took."""
    saver = Saver(Path(folder), megabytes, torch.device(device), timeout)
    orders.ready()
    try:
        for order in orders:
            orders.answer(**saver.ways[order["way"]]())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Saver:
    """A state, and the ways to save it. Files before are deleted only when the new one is whole, as ours does."""

    def __init__(self, folder: Path, megabytes: int, device: torch.device, timeout: float) -> None:
        torch.manual_seed(0)
        rows = megabytes * 2**20 // (4 * 1024 * _TENSORS)
        tensors = {f"layer{n}": torch.randn(rows, 1024, device=device) for n in range(_TENSORS)}
        self.state: dict[str, Any] = {"model": tensors}
        self._folder, self._timeout, self._cuda = folder, timeout, device.type == "cuda"
        self._host = {name: torch.empty_like(tensor, device="cpu") for name, tensor in tensors.items()}
        self._store = CheckpointStore(folder / "ours", CheckpointConfig(keep=1, keep_best=False), timeout)
        self._store.prepare(self.state)
        self._store.wait()
        self._number = 0
        self.ways: dict[str, Callable[[], dict[str, float]]] = {
            "copy": self.copy,
            "raw": self.raw,
            "torch.save": self.torch_save,
            "ours": self.ours,
        }

    def copy(self) -> dict[str, float]:
        """One copy in memory: what a save in the background cannot do without."""
        began = self._now()
        self._to_host()
        return {"stopped": self._now() - began}

    def raw(self) -> dict[str, float]:
        """The bytes in one file, synced, and read again."""
        path, before = self._next("bin")
        began = self._now()
        self._to_host()
        with open(path, "wb", buffering=0) as file:
            for tensor in self._host.values():
                view = tensor.numpy().data.cast("B")
                for at in range(0, len(view), _PIECE):
                    file.write(view[at : at + _PIECE])
            os.fsync(file.fileno())
        saved = self._now()
        before.unlink(missing_ok=True)
        began_reading = self._now()
        with open(path, "rb", buffering=0) as file:
            for tensor in self._host.values():
                _read_into(file, tensor)
        return {"stopped": saved - began, "durable": saved - began, "loading": self._now() - began_reading}

    def torch_save(self) -> dict[str, float]:
        """torch.save, synced, and torch.load."""
        path, before = self._next("pt")
        began = self._now()
        with open(path, "wb") as file:
            torch.save(self.state, file)
            file.flush()
            os.fsync(file.fileno())
        saved = self._now()
        before.unlink(missing_ok=True)
        began_loading = self._now()
        torch.load(path, map_location="cpu", weights_only=True)
        return {"stopped": saved - began, "durable": saved - began, "loading": self._now() - began_loading}

    def ours(self) -> dict[str, float]:
        """In the background: the caller goes on after a copy; committed means whole, synced and visible."""
        self._number += 1
        began = self._now()
        self._store.save(self.state, step=self._number, epoch=0, metrics={})
        stopped = self._now() - began
        while not (committed := self._store.committed()):
            if self._now() - began > self._timeout:
                self._store.wait()  # says what went wrong, if it knows
                raise BenchError(f"{self._folder}: no checkpoint within {self._timeout:g} s")
            time.sleep(0.0005)
        durable = self._now() - began
        self._store.wait()  # it is read again and compared, and the one before is deleted
        began_loading = self._now()
        self._store.load(committed[-1])
        return {"stopped": stopped, "durable": durable, "loading": self._now() - began_loading}

    def _to_host(self) -> None:
        for name, tensor in self.state["model"].items():
            self._host[name].copy_(tensor)

    def _next(self, kind: str) -> tuple[Path, Path]:
        self._number += 1
        before = next(iter(sorted(self._folder.glob(f"*.{kind}"))), self._folder / "none")
        return self._folder / f"{self._number:06}.{kind}", before

    def _now(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


def _read_into(file: Any, tensor: Tensor) -> None:
    view = tensor.numpy().data.cast("B")
    at = 0
    while at < len(view):
        at += file.readinto(view[at : at + _PIECE])
