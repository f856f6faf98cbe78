"""Lightning Fabric, as its documentation converts a loop."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from torch.utils.data import DataLoader

from distributed_training.bench.loops.base import Pace, PacedBatches, prepare
from distributed_training.bench.turn_worker import Orders


def run(orders: Orders, *, job: str, changes: dict[str, Any], device: str, threads: int) -> None:
    """Train without end."""
    name = "lightning.fabric" if importlib.util.find_spec("lightning") else "lightning_fabric"
    fabric = importlib.import_module(name).Fabric(accelerator="gpu" if device == "cuda" else "cpu", devices=1)
    settings, place = prepare(job, changes, device, threads)
    fabric.launch()
    model = settings.build()
    model, optimizer = fabric.setup(model, settings.optimizer(model))
    data = PacedBatches(settings.batches(place), Pace(orders, settings.warm, settings.steps, place), settings)
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=None))
    while True:
        for batch in loader:
            optimizer.zero_grad()
            loss = settings.loss(model, batch)
            fabric.backward(loss)
            optimizer.step()
