"""A dataset with only `__getitem__`: ours, beside a process that calls it, stacks, and does nothing else; and beside
one that also sends what it stacked over a plain socket."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from distributed_training.bench.transport.base import Case, Take
from distributed_training.bench.transport.ours import feed
from distributed_training.bench.transport.raw import sending

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


def _stacked(case: Case, kind: type[Rows]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Call and stack, in the order of a shuffle."""
    dataset = kind(case)
    while True:
        order = torch.randperm(len(dataset)).tolist()
        for first in range(0, len(order), case.rows):
            samples = [dataset[index] for index in order[first : first + case.rows]]
            yield torch.stack([one for one, _ in samples]), torch.tensor([label for _, label in samples])


def alone(case: Case, take: Take, *, kind: type[Rows]) -> None:
    """Nothing but that."""
    for inputs, targets in _stacked(case, kind):
        if not take(inputs, targets):
            return


def sent(case: Case, take: Take, *, kind: type[Rows]) -> None:
    """And sent over a plain socket."""

    def batches(case: Case) -> Iterator[list[memoryview]]:
        for batch in _stacked(case, kind):
            yield [memoryview(part.numpy()).cast("B") for part in batch]

    sending(case, take, batches)


def ours(case: Case, take: Take, *, kind: type[Rows], shared: bool) -> None:
    """The same dataset behind a loader worker."""
    from distributed_training.data import as_dataset

    dataset: Any = as_dataset(kind(case))
    feed(dataset, case, take, shared=shared)


WAYS = {
    "rows, alone": functools.partial(alone, kind=Rows),
    "rows, sent": functools.partial(sent, kind=Rows),
    "rows, ours": functools.partial(ours, kind=Rows, shared=False),
    "rows, ours in shared memory": functools.partial(ours, kind=Rows, shared=True),
    "prepared, alone": functools.partial(alone, kind=Prepared),
    "prepared, sent": functools.partial(sent, kind=Prepared),
    "prepared, ours": functools.partial(ours, kind=Prepared, shared=False),
    "prepared, ours in shared memory": functools.partial(ours, kind=Prepared, shared=True),
}
