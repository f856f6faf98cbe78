"""Batches from anything that can only be iterated, with a weaker guarantee that is said aloud."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from distributed_training.data.base import Batch, BatchSource
from distributed_training.data.nested import batch_length, map_tensors
from distributed_training.runtime.errors import DataError

logger = logging.getLogger(__name__)


class StreamSource(BatchSource):
    """Batches of an iterable: an IterableDataset's DataLoader, a custom sampler, a list of batches.

    There are no sample ids, so the order is whatever the iterable gives. A resume skips the batches already used by
    reading past them, and is exact only if the iterable repeats itself.
    """

    exact = False

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches
        self._warned = False

    @property
    def steps_per_epoch(self) -> int | None:
        """The iterable's length where it has one."""
        try:
            return len(self._batches)  # type: ignore[arg-type]
        except TypeError:
            return None

    def batches(self, epoch: int, start: int = 0) -> Iterator[tuple[int, Batch]]:
        """Yield (step, batch), numbering samples as they come."""
        if not self._warned:
            logger.warning(
                "%s has no sample plan: order and resume are only as exact as its own iteration. "
                "Pass a map-style dataset for exact resume.",
                type(self._batches).__name__,
            )
            self._warned = True
        parts = [getattr(self._batches, name, None) for name in ("sampler", "batch_sampler", "dataset")]
        for holder in (self._batches, *parts):
            set_epoch = getattr(holder, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)
        first = 0
        step = -1
        for step, data in enumerate(self._batches):
            size = batch_length(data)
            if step >= start:
                yield step, self.share.batch(np.arange(first, first + size), self._own_rows(data, size))
            first += size  # also of the batches read past, so that a resume numbers samples as the whole epoch does
        if step < 0:
            raise DataError(
                f"{type(self._batches).__name__} gave no batch in epoch {epoch}: the dataset is empty, "
                "or a generator that can be read only once (pass something that starts anew with each iter())"
            )

    def _own_rows(self, data: Any, size: int) -> Any:
        """Every rank reads the whole stream and keeps its part: without ids there is no other way to divide it."""
        if self.share.ranks == 1:
            return data
        rows = self.share.rows(size)
        return map_tensors(lambda t: t[rows] if t.ndim and len(t) == size else t, data)
