"""The training loop: the same for one process, many ranks, and batches from other machines."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from distributed_training.data.base import ToldToStop
from distributed_training.strategies.base import Strategy
from distributed_training.training.callbacks import Callback
from distributed_training.training.capture import CapturedStep
from distributed_training.training.guard import NonfiniteGuard
from distributed_training.training.ledger import Ledger
from distributed_training.training.schedule import Schedule
from distributed_training.training.step import TrainStep, check_labels

if TYPE_CHECKING:
    from distributed_training.training.session import Session


class Loop:
    """Steps through epochs from the trainer's cursor on, until the last epoch or a wish to stop."""

    def __init__(self, session: Session, step: TrainStep | CapturedStep, schedule: Schedule, ledger: Ledger) -> None:
        trainer, config = session.trainer, session.trainer.config
        self.session, self.source, self.scheduler = session, session.source, session.scheduler
        self.step, self.schedule, self.ledger = step, schedule, ledger
        self.guard = NonfiniteGuard(config.training.max_nonfinite_steps, trainer.device, session.leads)
        self.meter = LossMeter(trainer.strategy)
        self._stop = StopVote(session)
        # Only callbacks that look at steps are asked at steps.
        self._watchers = [c for c in trainer.callbacks if type(c).on_step_end is not Callback.on_step_end]
        self._log_every, self._save_every = config.training.log_every, config.checkpoint.every_steps
        self._last_step = config.run.stop_after_steps
        self._checked_epoch: int | None = 0 if trainer.device.type == "cuda" and trainer.num_classes else None

    def run(self) -> None:
        """Train until the last epoch is done or `trainer.stopping` says why not."""
        session, trainer = self.session, self.session.trainer
        cursor = trainer.cursor
        self._stop_if_enough()
        while cursor.epoch < trainer.epochs and not trainer.stopping:
            trainer.notify("on_epoch_start", cursor.epoch)
            self._epoch(cursor.epoch)
            if trainer.stopping:
                break
            with self.meter.paused():
                try:
                    session.end_epoch(cursor.epoch)
                except ToldToStop:  # no held-out samples came: the end of this epoch is for the run that goes on
                    if trainer.strategy.world_size > 1 or not trainer.stopping:
                        raise
                    break
                cursor.epoch, cursor.step = cursor.epoch + 1, 0
                session.epoch_done()
                trainer.notify("on_epoch_saved", cursor.epoch - 1)
                self._stop.vote()

    def _epoch(self, epoch: int) -> None:
        trainer, steps = self.session.trainer, self.source.steps_per_epoch
        cursor = trainer.cursor
        for step, batch in self.source.batches(epoch, cursor.step):
            if self._checked_epoch == epoch:
                check_labels(batch, trainer.num_classes or 0)
            self.schedule.apply(epoch, step, steps)
            loss, result = self.step(batch, epoch, step)
            self.guard.update(result, batch, epoch, step)
            self.meter.add(loss, batch.step_size, result.norm)
            self.ledger.record(epoch, step, batch.ids if batch.step_ids is None else batch.step_ids, batch.skipped)
            if self.scheduler is not None:
                self.scheduler.step()
            cursor.step = step + 1
            cursor.global_step += 1
            for callback in self._watchers:
                callback.on_step_end(trainer, step, loss)
            if cursor.global_step % self._log_every == 0:
                self.log(epoch, step, steps)
            if self._save_every and cursor.global_step % self._save_every == 0 and cursor.step != steps:
                self.session.save()
            self._stop.step_done()
            self._stop_if_enough()
            if trainer.stopping:
                return
        if self.meter.pending:
            self.log(epoch, cursor.step - 1, steps)

    def _stop_if_enough(self) -> None:
        """End at `run.stop_after_steps`: all ranks count alike, so all of them ask for it in the same step."""
        if self._last_step is not None and self.session.trainer.cursor.global_step >= self._last_step:
            self.session.trainer.stop(f"run.stop_after_steps={self._last_step}")
            self._stop.vote()

    def log(self, epoch: int, step: int, steps: int | None) -> None:
        """Read the loss from the device and tell trackers and callbacks: the only wait for the device in the loop."""
        self.guard.check()
        metrics = self.meter.read()
        metrics["lr"] = self.schedule.lr
        metrics["epoch"] = epoch + (step + 1) / steps if steps else float(epoch)
        metrics |= self.source.metrics()
        self.session.log(metrics)


class StopVote:
    """Ranks must stop at the same step, but a signal or a callback may reach only one of them: so they vote.

    About once a second, and in the same steps on all ranks. One process alone needs no vote.
    """

    def __init__(self, session: Session) -> None:
        self._session, self._strategy = session, session.trainer.strategy
        self._alone = self._strategy.world_size == 1
        self._every, self._steps, self._since = 1, 0, time.perf_counter()

    def step_done(self) -> None:
        """Vote, if it is time."""
        if self._alone:
            return
        self._steps += 1
        if self._steps >= self._every:
            self.vote()

    def vote(self) -> None:
        """Stop on all ranks if one of them is to stop."""
        if self._alone:
            return
        session, now = self._session, time.perf_counter()
        own = [bool(session.signals.received), bool(session.trainer.own_wish_to_stop), now - self._since, self._steps]
        votes = torch.tensor(own, dtype=torch.float64, device=self._strategy.device).float()
        with self._strategy.waiting("a vote of all ranks"):
            signals, wishes, seconds, steps = self._strategy.reduce(votes).tolist()
        session.agree(bool(signals), bool(wishes))
        if seconds > 0 and steps:
            self._every = max(1, min(1000, int(_VOTE_SECONDS * steps / seconds)))
        self._steps, self._since = 0, now


_VOTE_SECONDS = 1.0
_PENDING = 1024


class LossMeter:
    """Mean loss over the samples of all ranks since it was last read. Losses wait on the device until then."""

    def __init__(self, strategy: Strategy | None = None) -> None:
        self._strategy = strategy if strategy is not None and strategy.world_size > 1 else None
        self._losses: list[torch.Tensor] = []
        self._sizes: list[int] = []
        self._sum, self._counted, self._samples = 0.0, 0, 0
        self._norm: torch.Tensor | None = None
        self._since = time.perf_counter()
        self._all_samples, self._all_seconds = 0, 0.0

    @property
    def pending(self) -> bool:
        """Whether there are steps that were not read yet."""
        return bool(self._losses or self._samples)

    def add(self, loss: torch.Tensor, size: int, norm: torch.Tensor | None) -> None:
        """Count a step."""
        self._losses.append(loss)
        self._sizes.append(size)
        self._norm = norm
        if len(self._losses) >= _PENDING:
            self._collect()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Validation and saving are not training: their time does not count in samples/s."""
        before = time.perf_counter()
        yield
        self._since += time.perf_counter() - before

    def read(self) -> dict[str, float]:
        """{train_loss, samples_per_second, grad_norm} since the last time."""
        self._collect()
        now = time.perf_counter()
        self._all_samples += self._samples
        self._all_seconds += now - self._since
        metrics = {
            "train_loss": self._sum / self._counted if self._counted else float("nan"),
            "samples_per_second": self._samples / max(now - self._since, 1e-9),
        }
        if self._norm is not None:
            metrics["grad_norm"] = float(self._norm)
        self._sum, self._counted, self._samples, self._since = 0.0, 0, 0, now
        return metrics

    @property
    def samples_per_second(self) -> float:
        """Over all that was read since training (re)started."""
        return self._all_samples / max(self._all_seconds, 1e-9)

    def _collect(self) -> None:
        """Read what waits on the device. A step that was skipped, its loss not finite, has nothing worth averaging."""
        if not self._losses:
            return
        if self._strategy is not None:  # each rank has its part of the losses
            with self._strategy.waiting("the mean loss of all ranks"):
                values = self._strategy.reduce(torch.stack(self._losses).float()).tolist()
        elif self._losses[0].device.type == "cpu":
            values = [loss.item() for loss in self._losses]
        else:
            values = torch.stack(self._losses).tolist()
        for value, size in zip(values, self._sizes):
            if math.isfinite(value):
                self._sum += value * size
                self._counted += size
        self._samples += sum(self._sizes)
        self._losses.clear()
        self._sizes.clear()

    def state(self) -> dict[str, Any]:
        """What a resume needs to log the same loss as an uninterrupted run."""
        self._collect()
        return {"sum": self._sum, "counted": self._counted, "samples": self._samples}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave."""
        self._sum, self._counted, self._samples = state["sum"], state["counted"], state["samples"]
