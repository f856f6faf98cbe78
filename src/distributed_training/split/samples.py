"""Every sample of a dataset once, in its order, as batches for a GPU side that validates or predicts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from distributed_training.data import Dataset, Loader, Plan, as_source
from distributed_training.data.loader import LoaderProcessError
from distributed_training.feed.client import Loaded
from distributed_training.feed.course import Part, Piece
from distributed_training.runtime.errors import ConfigError, DataError

OnBadSample = Literal["stop", "skip"]


class Samples:
    """Batches in the order of the dataset, whatever the number of loader processes. To be closed."""

    def __init__(
        self,
        data: Any,
        batch_size: int,
        *,
        num_workers: int = 0,
        on_bad_sample: OnBadSample = "stop",
        deadline: float = 300.0,
    ) -> None:
        """`data` is a dataset, arrays, or a DataLoader, whose own batch size and workers are kept."""
        if batch_size < 1 or num_workers < 0:
            raise ConfigError(f"batch_size={batch_size}, num_workers={num_workers}: at least 1, and not below 0")
        if on_bad_sample not in ("stop", "skip"):
            raise ConfigError(f"on_bad_sample={on_bad_sample!r} is neither 'stop' nor 'skip'")
        source = as_source(data, Plan(0, batch_size, 0, shuffle=False), every_sample=True, deadline=deadline)
        if not isinstance(source, Loader):
            raise DataError(
                f"{type(data).__name__} can only be read from its beginning to its end; pass a dataset with __len__ "
                "and __getitem__, so that results can be named by sample"
            )
        if num_workers and not hasattr(data, "num_workers"):
            source = Loader(source.dataset, source.plan, num_workers=num_workers, deadline=deadline)
        self._loader, self._skips = source, on_bad_sample == "skip"
        self.skipped: dict[int, str] = {}
        """Samples that were left out, with the reason."""

    def __len__(self) -> int:
        """Samples in all."""
        return len(self._loader.dataset)

    @property
    def dataset(self) -> Dataset:
        """What they are from."""
        return self._loader.dataset

    def __iter__(self) -> Iterator[Loaded]:
        step, steps = 0, self._loader.steps_per_epoch
        while step < steps:
            try:
                for number, batch in self._loader.batches(0, step):
                    yield Loaded(number, batch.ids, batch.data)
                    step = number + 1
            except LoaderProcessError:
                raise
            except Exception as error:
                yield self._without_bad(step, error)
                step += 1

    def close(self) -> None:
        """End loader processes."""
        self._loader.close()

    def _without_bad(self, step: int, error: Exception) -> Loaded:
        """A step that cannot be loaded, without the samples that are to blame; DataError names them."""
        piece = Piece(Part(self._loader.dataset, self._loader.plan), 0, step, step + 1, 0)
        ids = piece.ids()
        bad = piece.bad_samples(ids)
        if not bad:
            raise error
        if not self._skips:
            sample, text = next(iter(bad.items()))
            raise DataError(
                f"sample {sample} cannot be loaded: {text}; repair it, or pass on_bad_sample='skip' to go on without "
                "such samples"
            ) from error
        self.skipped |= bad
        rest = ids[~np.isin(ids, list(bad))]
        return Loaded(step, rest, piece.fetch(rest) if len(rest) else None, bad)
