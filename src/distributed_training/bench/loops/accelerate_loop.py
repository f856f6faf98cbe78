"""Hugging Face accelerate, as its quick tour shows it."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from distributed_training.bench.loops.base import Pace, PacedBatches, prepare
from distributed_training.bench.turn_worker import Orders


def run(orders: Orders, *, job: str, changes: dict[str, Any], device: str, threads: int) -> None:
    """Train without end."""
    from accelerate import Accelerator

    settings, place = prepare(job, changes, device, threads)
    accelerator = Accelerator(cpu=place.type == "cpu")
    model = settings.build()
    data = PacedBatches(settings.batches(place), Pace(orders, settings.warm, settings.steps, place), settings)
    model, optimizer, loader = accelerator.prepare(model, settings.optimizer(model), DataLoader(data, batch_size=None))
    while True:
        for batch in loader:
            optimizer.zero_grad()
            loss = settings.loss(model, batch)
            accelerator.backward(loss)
            optimizer.step()
