"""The Trainer of transformers, with a model that returns its loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from distributed_training.bench.jobs import Job
from distributed_training.bench.loops.base import NamedBatches, Pace, prepare
from distributed_training.bench.turn_worker import Orders

_EPOCHS = 10**5


class WithLoss(nn.Module):
    """A model that takes the targets too, as those of transformers do."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.model, self._job = job.build(), job

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The loss of a batch."""
        return {"loss": self._job.loss(self.model, (inputs, labels))}


def run(orders: Orders, *, job: str, changes: dict[str, Any], device: str, threads: int) -> None:
    """Train without end."""
    from transformers import Trainer, TrainingArguments

    settings, place = prepare(job, changes, device, threads)
    data = NamedBatches(settings.batches(place), Pace(orders, settings.warm, settings.steps, place), settings)

    class Given(Trainer):
        """Takes whole batches, which its own loader would put together from samples."""

        def get_train_dataloader(self) -> DataLoader[Any]:
            loader: DataLoader[Any] = self.accelerator.prepare(DataLoader(data, batch_size=None))
            return loader

    arguments = TrainingArguments(
        output_dir=str(orders.folder),
        num_train_epochs=_EPOCHS,
        per_device_train_batch_size=settings.batch_size,
        use_cpu=place.type == "cpu",
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    model = WithLoss(settings)
    optimizer = settings.optimizer(model)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    Given(model, arguments, train_dataset=data, optimizers=(optimizer, constant)).train()
