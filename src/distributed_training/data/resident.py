"""Data that lies on the device: a batch is gathered there, and nothing but sample numbers travels.

Copying a batch from the host costs more than a step of a small model, and keeps the processor busy for a large one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distributed_training.data.arrays import gather_rows
from distributed_training.data.base import Batch, Dataset, Share, StoredRows
from distributed_training.data.plan import Plan
from distributed_training.runtime.errors import ConfigError

logger = logging.getLogger(__name__)

_WINDOW = 2**18  # sample numbers on the device at a time: 2 MiB
_OF_ALL, _OF_FREE = 0.1, 0.5  # shares of a GPU's memory that data may take by itself: the model comes first


class Table:
    """A dataset's rows on a device, and a window of sample numbers beside them, in the order of training."""

    def __init__(self, stored: Any, device: torch.device) -> None:
        self.device = device
        self.host = _map_stored(lambda rows: rows.tensor, stored)
        """The same tensors where they were."""
        self._tensors = _map_stored(lambda rows: rows.tensor.to(device), stored)
        self.checked: int | None = None
        """The number of classes that the labels were checked for."""
        self.ids = torch.zeros(_WINDOW, dtype=torch.int64, device=device)
        """The window. It stays where it is, so that a recorded step can read it."""

    def gather(self, ids: Tensor) -> Any:
        """The rows with these numbers, as `Dataset.fetch` gives them."""
        return _map_tensors(lambda tensor: gather_rows(tensor, ids), self._tensors)

    def batches(self, plan: Plan, share: Share, epoch: int, start: int) -> Iterator[tuple[int, Batch]]:
        """Yield (step, batch), its data as `ResidentRows`."""
        planned = max(1, _WINDOW // plan.batch_size)
        for first in range(start, plan.steps_per_epoch, planned):
            last = min(first + planned, plan.steps_per_epoch)
            ids = plan.span(epoch, first, last)
            steps = [ids[at : at + plan.batch_size] for at in range(0, len(ids), plan.batch_size)]
            own = ids if share.ranks == 1 else np.concatenate([step[share.rows(len(step))] for step in steps])
            # Copied in the order of the steps: those that are under way have read the window before it changes.
            self.ids[: len(own)].copy_(torch.from_numpy(own).pin_memory(), non_blocking=True)
            at = 0
            for step, step_ids in enumerate(steps, first):
                rows = ResidentRows(self, at, 0)
                batch = share.batch(step_ids, rows)
                rows.count = len(batch.ids)
                at += rows.count
                yield step, batch


class ResidentRows:
    """A batch that was not gathered yet: so many rows from a place of the window on."""

    __slots__ = ("count", "start", "table")

    def __init__(self, table: Table, start: int, count: int) -> None:
        self.table, self.start, self.count = table, start, count

    def gather(self) -> Any:
        """The batch, on the device."""
        return self.table.gather(self.table.ids[self.start : self.start + self.count])


def make_resident(dataset: Dataset, plan: Plan, device: torch.device | None, choice: str) -> Table | None:
    """The dataset on the device, where it is to be there: `choice` is `data.resident`."""
    if choice == "off" or device is None or device.type != "cuda":
        if choice == "on":
            raise ConfigError("data.resident=on: the training does not run on a GPU; leave it at auto")
        return None
    stored = dataset.rows(np.zeros(1, dtype=np.int64)) if plan.batch_size <= _WINDOW else None
    if stored is None:
        if choice == "on":
            raise ConfigError(
                f"data.resident=on: {type(dataset).__name__} is not made of arrays in memory alone, so it cannot be "
                "kept on the GPU; leave it at auto"
            )
        return None
    size = len(dataset) * (dataset.sample_bytes or 0)
    free, whole = torch.cuda.mem_get_info(device)
    if choice == "auto" and size > min(_OF_ALL * whole, _OF_FREE * free):
        logger.info("the data (%.1f GiB) stays on the host: data.resident=on would keep it on the GPU", size / 2**30)
        return None
    try:
        return Table(stored, device)
    except torch.OutOfMemoryError as error:
        if choice == "on":
            raise ConfigError(
                f"data.resident=on: {size / 2**30:.1f} GiB of data do not fit on {device}, which has "
                f"{free / 2**30:.1f} GiB free; use data.resident=off"
            ) from error
        return None


def _map_stored(function: Any, stored: Any) -> Any:
    if isinstance(stored, StoredRows):
        return function(stored)
    if isinstance(stored, dict):
        return {key: function(rows) for key, rows in stored.items()}
    return tuple(function(rows) for rows in stored)


def _map_tensors(function: Any, tensors: Any) -> Any:
    if isinstance(tensors, Tensor):
        return function(tensors)
    if isinstance(tensors, dict):
        return {key: function(tensor) for key, tensor in tensors.items()}
    return tuple([function(tensor) for tensor in tensors])
