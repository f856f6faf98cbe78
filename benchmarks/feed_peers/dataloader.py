"""torch's DataLoader with one worker: sample by sample as usual, and whole batches as its documentation allows."""

from __future__ import annotations

from typing import Any

import torch

from distributed_training.bench.transport.base import Case, Take

NEEDS: list[str] = []


def _read(loader: Any, take: Take) -> None:
    while True:
        for inputs, targets in loader:
            if not take(inputs, targets):
                return


def _tensors(case: Case) -> Any:
    from torch.utils.data import TensorDataset

    return TensorDataset(*[torch.from_numpy(part) for part in case.arrays()])


def by_sample(case: Case, take: Take) -> None:
    """`DataLoader(TensorDataset, batch_size=64, shuffle=True, num_workers=1)`."""
    from torch.utils.data import DataLoader

    _read(DataLoader(_tensors(case), case.rows, shuffle=True, num_workers=1, persistent_workers=True), take)


def by_batch(case: Case, take: Take) -> None:
    """A batch sampler in place of the sampler: the dataset is indexed by a list, once a batch."""
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler

    dataset = _tensors(case)
    batches = BatchSampler(RandomSampler(dataset), case.rows, drop_last=False)
    _read(DataLoader(dataset, None, sampler=batches, num_workers=1, persistent_workers=True), take)


WAYS = {"torch DataLoader, samples": by_sample, "torch DataLoader, whole batches": by_batch}
