"""What all loops have in common: the clock, and data that hands out turns."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from distributed_training.bench.jobs import JOBS, Batch, Job
from distributed_training.bench.turn_worker import Orders, room


def prepare(job: str, changes: dict[str, Any], device: str, threads: int) -> tuple[Job, torch.device]:
    """The job with what was changed of it, and the device; sets the CPU threads."""
    if threads:
        torch.set_num_threads(threads)
    return replace(JOBS[job], **changes), torch.device(device)


class Pace:
    """Lets a loop run one turn at a time and takes the time of its steps.

    A turn is `warm + steps + 1` steps, of which the loops of others think as an epoch. `begin(step)` is called when the
    loop asks for the data of a step. Before the first the loop waits for its turn; what it did after the clock had
    stopped (the last step, the end of an epoch) is over by then, and disturbs nobody else's turn. The first turn sets
    everything up.
    """

    def __init__(self, orders: Orders, warm: int, steps: int, device: torch.device) -> None:
        self._orders, self._device = orders, device
        self._first, self._last, self._steps = warm, warm + steps, steps
        self._turns, self._began, self._seconds = 0, 0.0, 0.0
        self.facts: dict[str, Any] = {}
        """Further values for the answer."""

    def begin(self, step: int) -> None:
        """Step `step` of the turn is about to begin."""
        if step == self._first:
            self._synchronize()
            self._began = time.perf_counter()
        elif step == self._last:
            self._synchronize()
            self._seconds = (time.perf_counter() - self._began) / self._steps
        elif step == 0:
            self._pause()

    def _pause(self) -> None:
        self._synchronize()
        if self._turns:
            self._orders.answer(
                turn=self._turns, seconds=self._seconds, **self._peak(), **room(self._device), **self.facts
            )
            self._orders.wait_or_end()
        self._turns += 1

    def _peak(self) -> dict[str, float]:
        return {"peak_bytes": torch.cuda.max_memory_allocated()} if self._device.type == "cuda" else {}

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


class PacedBatches(torch.utils.data.Dataset[Any]):
    """The batches of a turn, as a dataset whose items are whole batches: nothing is collated or copied."""

    def __init__(self, batches: list[Batch], pace: Pace, job: Job) -> None:
        self._batches, self._pace, self._length = batches, pace, job.turn

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, step: int) -> Any:
        self._pace.begin(step)
        return self._batches[step % len(self._batches)]

    def __iter__(self) -> Iterator[Any]:
        return (self[step] for step in range(self._length))


class NamedBatches(PacedBatches):
    """The same as dicts, as transformers wants them."""

    def __getitem__(self, step: int) -> dict[str, Tensor]:
        inputs, targets = super().__getitem__(step)
        return {"inputs": inputs, "labels": targets}
