"""One training step: a batch to the device, forward, backward, update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distributed_training.data.base import Batch
from distributed_training.data.nested import split_batch
from distributed_training.data.plan import derive_key, extend_key
from distributed_training.data.resident import ResidentRows, Table
from distributed_training.runtime.errors import DataError
from distributed_training.runtime.seeds import seed_torch
from distributed_training.strategies.base import StepResult
from distributed_training.training.engine import Engine

_SEEDS = 2**63 - 1  # what torch takes as a seed


class TrainStep:
    """Runs a step under a strategy. Its randomness (dropout) is a function of (seed, epoch, step), like its samples."""

    def __init__(self, engine: Engine, parts: int, seed: int) -> None:
        self._engine, self._strategy, self._autocast = engine, engine.strategy, engine.autocast
        self._parts, self._seed = parts, seed
        self._epoch, self._epoch_key = -1, 0
        self._ranks = engine.strategy.world_size

    def __call__(self, batch: Batch, epoch: int, step: int) -> tuple[Tensor, StepResult]:
        """(loss, what the update did); both stay on the device. The losses of all ranks add up to the step's mean."""
        return self.compute(self.place(batch, epoch, step), batch)

    def place(self, batch: Batch, epoch: int, step: int, *, may_stay: bool = False) -> Any:
        """The batch's data on the device, and all generators where they belong in this step.

        `may_stay`: it may be given as it came, for somebody who copies and transforms it.
        """
        self._seed_step(epoch, step)
        if may_stay and self._engine.transforms_alone:
            return batch.data
        return self._engine.place(batch, epoch, training=True)

    def compute(self, data: Any, batch: Batch) -> tuple[Tensor, StepResult]:
        """The step itself, with the batch's data on the device: nothing in here waits for the device."""
        loss = self._in_parts(data, batch) if self._parts > 1 else self._whole(data, batch)
        return loss, self._strategy.step(loss)

    @contextmanager
    def exactly(self) -> Iterator[None]:
        """Within it steps are computed in the precision of the weights: what reduced precision is measured by."""
        kept, self._autocast = self._autocast, nullcontext()
        try:
            yield
        finally:
            self._autocast = kept

    def gradients(self, batch: Batch, epoch: int, step: int, share: float = 1.0, last: bool = True) -> Tensor:
        """Add the gradients of a batch to those that are there; its loss, as above.

        An update over several batches gives each its `share`; gradients travel between ranks with the last of them.
        """
        data = self.place(batch, epoch, step)
        if self._parts > 1:
            return self._in_parts(data, batch, share, last)
        if share == 1.0:
            return self._whole(data, batch)
        with self._strategy.micro_batch(last):
            return self._whole(data, batch, share)

    def _seed_step(self, epoch: int, step: int) -> None:
        if epoch != self._epoch:
            self._epoch, self._epoch_key = epoch, derive_key(self._seed, epoch)
            if self._strategy.rank:  # other samples, so other dropout
                self._epoch_key = extend_key(self._epoch_key, self._strategy.rank)
        seed_torch(self._epoch_key + step & _SEEDS, self._strategy.device)

    def _whole(self, data: Any, batch: Batch, share: float = 1.0) -> Tensor:
        self._strategy.counts = not batch.padding
        with self._autocast:
            loss = self._loss(data, batch)
            if self._ranks > 1:
                own, whole = self._engine.judged(data), None
                if own is not None:
                    own = own * (not batch.padding)
                    whole = self._in_step(own)
                loss = _weighted(loss, own, whole, batch.size / batch.step_size)
        self._strategy.backward(loss if share == 1.0 else loss * share)
        return loss.detach()

    def _in_parts(self, data: Any, batch: Batch, share: float = 1.0, last: bool = True) -> Tensor:
        """Micro-batches weighted by their size, so that the gradient is that of the whole batch."""
        total = torch.zeros((), device=self._strategy.device)
        most = -(-batch.step_size // self._ranks)  # the same on all ranks: some strategies talk in every micro-batch
        parts = split_batch(data, batch.rows, min(self._parts, most))
        counted = [0 if batch.padding else size for size, _ in parts]
        tokens, whole = [self._engine.judged(part) for _, part in parts], None
        tokens = [own * (size > 0) if own is not None else None for own, size in zip(tokens, counted)]
        if tokens[0] is not None:
            whole = self._in_step(sum(own for own in tokens if own is not None))
        for number, (size, own, (_, part)) in enumerate(zip(counted, tokens, parts), 1):
            self._strategy.counts = size > 0
            with self._strategy.micro_batch(last=last and number == len(parts)):
                with self._autocast:
                    loss = _weighted(self._loss(part, batch), own, whole, size / batch.step_size)
                self._strategy.backward(loss if share == 1.0 else loss * share)
            total += loss.detach()
        return total

    def _in_step(self, own: Any) -> Tensor:
        """The targets judged by all ranks together, of which this one has its own."""
        whole: Tensor = self._strategy.reduce(own) if self._ranks > 1 else own
        return whole.clamp(min=1)

    def _loss(self, data: Any, batch: Batch) -> Tensor:
        try:
            loss = self._engine.answer(data).loss
        except IndexError as error:  # the CPU's cross entropy; a GPU is asked beforehand, see check_labels
            raise _bad_label(error, batch) from error
        assert loss is not None
        return loss


def _weighted(loss: Tensor, own: Tensor | None, whole: Tensor | None, share: float) -> Tensor:
    """The part of the step's mean loss that a part of its batch is: by targets judged, or else by samples."""
    if own is None or whole is None:
        return loss * share
    # The mean over no target at all is NaN.
    return torch.where(own > 0, loss, torch.zeros_like(loss)) * (own / whole)


def check_labels(batch: Batch, classes: int) -> None:
    """Refuse class labels outside [0, classes) before a GPU sees them: there they would end the whole process."""
    data, targets = batch.data, batch.labels
    if isinstance(data, ResidentRows):
        _check_all_labels(data.table, classes)
        return
    if targets is None and isinstance(data, (tuple, list)) and len(data) > 1:
        targets = data[1]
    if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.ndim != 1 or targets.is_cuda:
        return
    wrong = ((targets < 0) & (targets != -100)) | (targets >= classes)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise DataError(
            f"sample {batch.ids[row]} has label {int(targets[row])}, but the model has classes 0 to {classes - 1}; "
            "set model.num_classes or correct the labels"
        )


def _check_all_labels(table: Table, classes: int) -> None:
    """As above, for data that lies on the device: all at once, the first time."""
    if table.checked == classes or not isinstance(table.host, tuple) or len(table.host) < 2:
        return
    table.checked = classes
    targets = table.host[1]
    check_labels(Batch(np.arange(len(targets)), table.host), classes)


def _bad_label(error: IndexError, batch: Batch) -> Exception:
    text = str(error)
    if "out of bounds" not in text:
        return error
    label = "".join(c for c in text if c.isdigit() or c == "-")
    targets = batch.data[1] if isinstance(batch.data, (tuple, list)) and len(batch.data) > 1 else None
    where = ""
    if isinstance(targets, Tensor) and label.lstrip("-").isdigit():
        rows = (targets == int(label)).reshape(batch.rows, -1).any(1).nonzero().flatten().tolist()
        where = f"sample {batch.ids[rows[0]]}: " if rows else ""
    return DataError(
        f"{where}label {label} is out of range for the model's outputs; set model.num_classes or correct the labels"
    )
