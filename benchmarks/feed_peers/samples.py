"""A dataset with only `__getitem__`: ours, beside a process that calls it, stacks, and does nothing else."""

from __future__ import annotations

import functools
from typing import Any

import torch
from benchmarks.feed_peers.base import Case, Take
from benchmarks.feed_peers.ours import feed

NEEDS = ["distributed_training"]


class Rows:
    """The cheapest samples there are: a view of a row and its label."""

    def __init__(self, case: Case) -> None:
        self.inputs, self.targets = [torch.from_numpy(part) for part in case.arrays()]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.inputs[index], int(self.targets[index])


class Prepared(Rows):
    """Samples that take some work, as images do: some arithmetic on the row."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        row = self.inputs[index].mul(2.0).sub_(1.0).clamp_(-3.0, 3.0)
        row[0] = self.inputs[index, 0]
        return row, int(self.targets[index])


def alone(case: Case, take: Take, *, kind: type[Rows]) -> None:
    """Call and stack, in the order of a shuffle."""
    dataset = kind(case)
    while True:
        order = torch.randperm(len(dataset)).tolist()
        for first in range(0, len(order), case.rows):
            samples = [dataset[index] for index in order[first : first + case.rows]]
            inputs = torch.stack([one for one, _ in samples])
            if not take(inputs, torch.tensor([label for _, label in samples])):
                return


def ours(case: Case, take: Take, *, kind: type[Rows], shared: bool) -> None:
    """The same dataset behind a loader worker."""
    from distributed_training.data import as_dataset

    dataset: Any = as_dataset(kind(case))
    feed(dataset, case, take, shared=shared)


WAYS = {
    "rows, alone": functools.partial(alone, kind=Rows),
    "rows, ours": functools.partial(ours, kind=Rows, shared=False),
    "rows, ours in shared memory": functools.partial(ours, kind=Rows, shared=True),
    "prepared, alone": functools.partial(alone, kind=Prepared),
    "prepared, ours": functools.partial(ours, kind=Prepared, shared=False),
    "prepared, ours in shared memory": functools.partial(ours, kind=Prepared, shared=True),
}
