"""A dataset with only `__getitem__`: ours, beside a process that calls it, stacks, and does nothing else; and beside
one that also sends what it stacked over a plain socket."""

from __future__ import annotations

import functools
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from distributed_training.bench.transport.base import Case, Take
from distributed_training.bench.transport.ours import feed
from distributed_training.bench.transport.raw import sending

NEEDS = ["distributed_training", "PIL"]


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


class Decoded(Rows):
    """Samples that take the work of most datasets of images: a file of 96 pixels is decoded, cropped and normalised."""

    SIDE = 96
    FILES = 256

    def __init__(self, case: Case) -> None:
        from PIL import Image

        super().__init__(case)
        self.width, self.open = self.inputs.shape[1], Image.open
        images = np.random.default_rng(0).integers(0, 256, (self.FILES, self.SIDE, self.SIDE), np.uint8)
        self.files = [_jpeg(Image.fromarray(image)) for image in images]

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with self.open(io.BytesIO(self.files[index % self.FILES])) as image:
            pixels = torch.from_numpy(np.asarray(image).reshape(-1)[: self.width].copy())
        row = pixels.float().div_(255).sub_(0.45).div_(0.25)
        row[0] = self.inputs[index, 0]  # by which the receiver knows that it is the right one
        return row, int(self.targets[index])


def _jpeg(image: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG")
    return file.getvalue()


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


_KINDS: dict[str, type[Rows]] = {"rows": Rows, "prepared": Prepared, "decoded": Decoded}
_HOW: dict[str, Any] = {
    "alone": alone,
    "sent": sent,
    "ours": functools.partial(ours, shared=False),
    "ours in shared memory": functools.partial(ours, shared=True),
}
WAYS = {f"{kind}, {how}": functools.partial(way, kind=_KINDS[kind]) for kind in _KINDS for how, way in _HOW.items()}
