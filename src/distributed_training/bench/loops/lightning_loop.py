"""Lightning: a LightningModule and its Trainer."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from torch.utils.data import DataLoader

from distributed_training.bench.loops.base import Pace, PacedBatches, prepare
from distributed_training.bench.turn_worker import Orders


def run(orders: Orders, *, job: str, changes: dict[str, Any], device: str, threads: int) -> None:
    """Train without end."""
    name = "lightning.pytorch" if importlib.util.find_spec("lightning") else "pytorch_lightning"
    lightning = importlib.import_module(name)
    settings, place = prepare(job, changes, device, threads)

    class Module(lightning.LightningModule):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = settings.build()

        def training_step(self, batch: Any, index: int) -> Any:
            return settings.loss(self.model, batch)

        def configure_optimizers(self) -> Any:
            return settings.optimizer(self.model)

    data = PacedBatches(settings.batches(place), Pace(orders, settings.warm, settings.steps, place), settings)
    trainer = lightning.Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(orders.folder),
    )
    trainer.fit(Module(), DataLoader(data, batch_size=None))
