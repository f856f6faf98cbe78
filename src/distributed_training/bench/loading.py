"""Loading in one process or several, by our loader, by torch's DataLoader and through the split.

`turn` is one measurement, for `forked_turns`. A loader is made anew for each: what it had prepared while the others had
their turn would count otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from distributed_training.bench.transport.ours import fed
from distributed_training.data import ArrayDataset, Loader, Plan, as_dataset
from distributed_training.data.resident import ResidentRows

SAMPLES, STORED, SIDE, BATCH = 4096, 64, 48, 64  # images of 64 pixels, scaled to 48 where there is work to do
_WARM_SECONDS, _WARM_BATCHES = 0.2, 4
_MEAN, _STD = 0.45, 0.25


class Arrays(TorchDataset[tuple[Tensor, Tensor]]):
    """Images of bytes in one array: nothing is left to do for a sample but to fetch it."""

    def __init__(self) -> None:
        numbers = np.random.default_rng(0)
        self.images = torch.from_numpy(numbers.integers(0, 256, (SAMPLES, 3, STORED, STORED), dtype=np.uint8))
        self.labels = torch.from_numpy(numbers.integers(0, 10, SAMPLES))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]


class Worked(Arrays):
    """The same with work in every sample, as images usually take: scaled, mirrored, normalised."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index].float().div_(255)
        image = F.interpolate(image[None], size=(SIDE, SIDE), mode="bilinear", antialias=True)[0]
        if index % 2:
            image = image.flip(2)
        return image.sub_(_MEAN).div_(_STD), self.labels[index]


def turn(*, kind: str, way: str, workers: int, pinned: bool, device: str, seconds: float) -> dict[str, float]:
    """Samples a second that reach the device."""
    torch.set_num_threads(1)
    source = Worked() if kind == "worked" else Arrays()
    with ExitStack() as stack:
        batches = _batches(stack, source, way, workers, pinned, torch.device(device))
        return {"rate": _rate(batches, torch.device(device), seconds)}


def _batches(
    stack: ExitStack, source: Arrays, way: str, workers: int, pinned: bool, device: torch.device
) -> Iterator[Any]:
    """Batches without end."""
    if way == "torch":
        return _from_torch(source, workers, pinned)
    whole = type(source) is Arrays
    dataset = ArrayDataset((source.images, source.labels), name="benchmark") if whole else as_dataset(source)
    plan = Plan(SAMPLES, BATCH, 0)
    if way in ("ours", "resident"):
        resident = "on" if way == "resident" else "off"
        loader = Loader(dataset, plan, num_workers=workers, pin_memory=pinned, resident=resident)
        loader.device = device  # as a training says it to any source
        stack.callback(loader.close)
        return (batch.data for epoch in range(10**6) for _, batch in loader.batches(epoch))
    server = stack.enter_context(fed(dataset, plan, workers, shared=way == "split"))
    received = server.source()
    received.device = device
    return (batch.data for epoch in range(10**6) for _, batch in received.batches(epoch))


def _from_torch(source: Arrays, workers: int, pinned: bool) -> Iterator[Any]:
    loader = DataLoader(
        source, BATCH, shuffle=True, num_workers=workers, pin_memory=pinned, persistent_workers=workers > 0
    )
    while True:
        yield from loader


def _rate(batches: Iterator[Any], device: torch.device, seconds: float) -> float:
    count, first, began = 0, time.perf_counter(), 0.0
    for data in batches:
        images, labels = data.gather() if isinstance(data, ResidentRows) else data
        count += len(labels)
        if device.type == "cuda":
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        now = time.perf_counter()
        if began and now - began >= seconds:
            break
        if not began and now - first >= _WARM_SECONDS and count >= _WARM_BATCHES * BATCH:
            _synchronize(device)
            began, count = time.perf_counter(), 0
    _synchronize(device)
    return count / (time.perf_counter() - began)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
