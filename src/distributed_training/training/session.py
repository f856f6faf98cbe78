"""One call of `Trainer.train`: run directory, resume, trackers, checkpoints and signals around the loop."""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from distributed_training.checkpoint import CheckpointInfo, CheckpointStore
from distributed_training.data.base import BatchSource
from distributed_training.runtime.device import machine_facts
from distributed_training.runtime.errors import OutOfMemoryError
from distributed_training.runtime.garbage import OldObjects
from distributed_training.runtime.group import job_identity
from distributed_training.runtime.run_directory import RunDirectory
from distributed_training.runtime.seeds import generators_state, restore_generators, seed_everything
from distributed_training.runtime.signals import StopSignals
from distributed_training.runtime.world import read_world
from distributed_training.tracking import RunInfo, Trackers, make_trackers
from distributed_training.training import evaluation
from distributed_training.training.agreement import check_same_everywhere, from_rank_0
from distributed_training.training.capture import CapturedStep
from distributed_training.training.kernels import KernelChoice
from distributed_training.training.ledger import Ledger
from distributed_training.training.loop import Loop
from distributed_training.training.measured import settle
from distributed_training.training.optimizers import apply_changes
from distributed_training.training.progress import make_progress
from distributed_training.training.recorder import Recorder
from distributed_training.training.result import Cursor, TrainingResult
from distributed_training.training.resume import check_same_base, check_same_training, find_start
from distributed_training.training.schedule import Schedule
from distributed_training.training.step import TrainStep

if TYPE_CHECKING:
    from distributed_training.training.trainer import Trainer

logger = logging.getLogger(__name__)
_trainings = itertools.count()


class Session:
    """Everything that lives as long as one training."""

    def __init__(
        self, trainer: Trainer, source: BatchSource, validation: BatchSource | None, scheduler: Any, resume: str
    ) -> None:
        config = self.config = trainer.recorded_config(source)
        self.trainer, self.source, self.validation, self.scheduler = trainer, source, validation, scheduler
        trainer.cursor, trainer.last_metrics = Cursor(), {}
        seed_everything(config.training.seed)
        self.agreed = ""
        """Why all ranks are to stop, once they have agreed."""
        self.leads = trainer.strategy.rank == 0
        """Whether this rank has the files, trackers and bars of the run. The others only compute."""
        self.run_dir: RunDirectory | None = None
        self.start: CheckpointInfo | None = None
        check_same_everywhere(trainer.strategy, config, trainer.model, self._source_facts)
        if self.leads:
            kind, job = type(trainer.model).__name__, self._job()
            self.run_dir, self.start = find_start(config, trainer.run_dir, resume, kind, job)
        self._settle()
        self.writes = trainer.run_dir is not False
        self.trackers = make_trackers(config.tracking, trainer.strategy.rank) if self.writes else Trackers([])
        self.store = (
            CheckpointStore(self.run_dir.checkpoints, config.checkpoint, config.run.deadline) if self.run_dir else None
        )
        self.signals = StopSignals(repeated=trainer.strategy.world_size > 1)
        self._progress = make_progress(config.run.progress) if self.leads else None
        self.loop: Loop  # made when the run begins
        self._old_objects = OldObjects()
        self._saved_step = -1
        self._prepared = self._warned = self._signalled = False
        trainer.strategy.heed(lambda: self.signals.arrived)

    def run(self) -> TrainingResult:
        """Train, and leave everything closed and reported whatever happens."""
        trainer, began = self.trainer, time.perf_counter()
        own_callbacks = list(trainer.callbacks)
        if self._progress is not None:
            trainer.callbacks.append(self._progress)
        if self.config.record.folder is not None:
            trainer.callbacks.append(Recorder(self.config, self._source_facts))
        status = "failed"
        try:
            with ExitStack() as stack:
                ledger = stack.enter_context(Ledger(self.run_dir.ledger_file if self.run_dir else None))
                stack.enter_context(self.signals)
                self.source.heed(lambda: bool(trainer.own_wish_to_stop))
                stack.callback(self.source.heed, lambda: False)
                self.loop = self._make_loop(ledger)
                stack.callback(self.loop.schedule.reset)
                self._begin(ledger)
                trainer.model.train()
                stack.enter_context(self._old_objects)
                self.loop.run()
                status = self._end()
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise _out_of_memory(error, trainer) from error
        except RuntimeError as error:
            if "can't allocate memory" in str(error) or "not enough memory" in str(error):
                raise _out_of_memory(error, trainer) from error
            raise
        finally:
            self._finish(status, began)
            trainer.callbacks[:] = own_callbacks
        return self._result(status, began)

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole training."""
        steps = self.source.steps_per_epoch
        return steps * self.trainer.epochs if steps is not None else None

    @functools.cached_property
    def _source_facts(self) -> dict[str, Any]:
        """What the batches are made of. Made once: it looks at the data."""
        return self.source.describe()

    def _job(self) -> str | None:
        """This training among those of a job that may be started again: a script may train more than once."""
        job = job_identity(read_world(), self.config.run.deadline)
        return f"{job}/{next(_trainings)}" if job is not None else None

    def save(self) -> None:
        """Checkpoint the training as it stands."""
        trainer = self.trainer
        if not self.writes or self._saved_step == trainer.cursor.global_step:
            return
        self.loop.ledger.flush()
        cursor, state = trainer.cursor, self._state()  # all ranks have a part in it
        if self.store is not None:
            self.store.save(state, step=cursor.global_step, epoch=cursor.epoch, metrics=trainer.last_metrics)
        self._saved_step = cursor.global_step
        self._report_committed()

    def log(self, metrics: Mapping[str, float]) -> None:
        """Metrics at this step to trackers and callbacks."""
        self.trainer.last_metrics |= metrics
        self.trackers.log(metrics, self.trainer.cursor.global_step)
        if self.writes and not self._prepared:  # not earlier: optimizers make their state in the first step
            self._prepared = True
            state = self._state()
            if self.store is not None:
                self.store.prepare(state)
        self.trainer.notify("on_log", metrics)
        self._report_committed()
        self._old_objects.set_aside()

    def end_epoch(self, epoch: int) -> None:
        """Validation, callbacks."""
        trainer = self.trainer
        if self.validation is not None:
            values = evaluation.evaluate(trainer.engine, self.validation, trainer.metrics)
            metrics = {f"val_{name}": value for name, value in values.items()}
            self.log({**metrics, "epoch": float(epoch + 1)})
            self._check_monitor(metrics)
            trainer.notify("on_validation_end", metrics)
        trainer.notify("on_epoch_end", epoch)

    def _check_monitor(self, metrics: Mapping[str, float]) -> None:
        monitor, known = self.config.checkpoint.monitor, ", ".join(metrics)
        if self.config.checkpoint.keep_best and monitor not in metrics and not self._warned:
            self._warned = True
            logger.warning("checkpoint.monitor=%s is not among %s: no checkpoint will count as best", monitor, known)

    def epoch_done(self) -> None:
        """The checkpoint of an epoch, with the cursor already at the next one."""
        every, cursor = self.trainer.config.checkpoint.every_epochs, self.trainer.cursor
        if every and cursor.epoch % every == 0 and cursor.epoch < self.trainer.epochs:
            self.save()

    def _make_loop(self, ledger: Ledger) -> Loop:
        trainer, training = self.trainer, self.trainer.config.training
        own_schedule = ("constant", 0.0) if self.scheduler is not None else (training.schedule, training.warmup_epochs)
        schedule = Schedule(trainer.optimizer, own_schedule[0], trainer.epochs, own_schedule[1])
        step = TrainStep(trainer.engine, training.gradient_accumulation, training.seed)
        kernels = KernelChoice(training.compile, Path(trainer.config.run.cache).expanduser())
        captured = CapturedStep(step, trainer.engine, training.capture, kernels, self._steps_left)
        return Loop(self, captured if captured.wanted else step, schedule, ledger)

    def _settle(self) -> None:
        """Put what a measurement says in the place of settings left at auto."""
        run = self.start.path.parent.parent if self.start is not None else None
        if chosen := settle(self.trainer, self.source, self.total_steps, run):
            self.trainer.config = self.trainer.config.replace(**chosen)
            self.config = self.config.replace(**chosen)
            if self.run_dir is not None:
                self.config.save(self.run_dir.config_file)

    def _steps_left(self) -> int | None:
        limits = [limit for limit in (self.total_steps, self.config.run.stop_after_steps) if limit is not None]
        return min(limits) - self.trainer.cursor.global_step if limits else None

    def _begin(self, ledger: Ledger) -> None:
        trainer = self.trainer
        if not self.source.local:
            ledger.fed(self._source_facts, self.source.told)
        state = self.store.load(self.start) if self.start is not None and self.store is not None else None
        state = from_rank_0(trainer.strategy, state)
        if state is not None:
            self._load(state)
            if self.start is not None:
                self._announce(self.start)
            ledger.resumed(trainer.cursor.epoch, trainer.cursor.step)
            self._saved_step = trainer.cursor.global_step
        if self.run_dir is not None:
            parameters = sum(p.numel() for p in trainer.model.parameters())
            facts = {"model": type(trainer.model).__name__, "parameters": parameters, "strategy": trainer.strategy.name}
            resumed = trainer.cursor.global_step if self.start is not None else None
            facts |= machine_facts(trainer.device)
            self.trackers.start(RunInfo(self.run_dir.name, self.run_dir.path, self.config.to_dict(), resumed, facts))
        trainer.notify("on_train_start")

    def _announce(self, start: CheckpointInfo) -> None:
        trainer = self.trainer
        if trainer.cursor.epoch >= trainer.epochs:
            logger.warning("%s is complete at epoch %d: raise training.epochs to go on", start.path, trainer.epochs)
            return
        logger.info("resumed from %s", start.path)
        if self.run_dir is not None:  # what the run goes on with; that it was resumed is an event, not a setting
            self.config.replace(**{"checkpoint.resume": "never"}).save(self.run_dir.config_file)

    def _end(self) -> str:
        trainer = self.trainer
        complete = trainer.cursor.epoch >= trainer.epochs
        self.save()
        if self.store is not None:
            self.store.wait()
        self._report_committed()
        trainer.strategy.barrier()  # nobody leaves before the last checkpoint is safe
        if complete:
            return "completed"
        return "interrupted" if self._signalled or self.signals.received is not None else "stopped early"

    def agree(self, signalled: bool, wished: bool) -> None:
        """What the ranks voted: stop because one of them received a signal, or because one wishes to."""
        if signalled or wished:
            self._signalled = self._signalled or signalled
            self.agreed = self.trainer.own_wish_to_stop or f"asked by {'a signal to ' if signalled else ''}another rank"

    def _finish(self, status: str, began: float) -> None:
        """Close what is open without hiding an error that is on its way."""
        trainer = self.trainer
        if self.store is not None:
            try:
                self.store.wait()
            except Exception as error:
                logger.error("%s", error)
        try:
            trainer.notify("on_train_end", status)
        finally:
            summary = {**trainer.last_metrics, "seconds": time.perf_counter() - began}
            if hasattr(self, "loop"):
                summary["samples_per_second"] = self.loop.meter.samples_per_second
            self.trackers.finish(status, summary)

    def _result(self, status: str, began: float) -> TrainingResult:
        trainer = self.trainer
        best = self.store.best() if self.store is not None else None
        reason = f"{self.signals.received.name} received" if self.signals.received is not None else trainer.stopping
        path = trainer.strategy.gather_values(str(self.run_dir.path) if self.run_dir else None)[0]
        return TrainingResult(
            status=status,
            reason=reason,
            epochs=trainer.cursor.epoch,
            steps=trainer.cursor.global_step,
            seconds=time.perf_counter() - began,
            metrics=dict(trainer.last_metrics),
            skipped_steps=self.loop.guard.skipped,
            run_dir=Path(path) if path else None,
            best_checkpoint=best.path if best is not None else None,
        )

    def _state(self) -> dict[str, Any]:
        trainer = self.trainer
        state: dict[str, Any] = {
            **trainer.strategy.state(),
            "cursor": vars(trainer.cursor),
            "metrics": trainer.last_metrics,
            "meter": self.loop.meter.state(),
            "generators": generators_state(),
            "callbacks": {f"{i}-{type(c).__name__}": c.state() for i, c in enumerate(trainer.callbacks)},
            "source": self._source_facts,
            "config": self.config.to_dict(),
        }
        if isinstance(self.loop.step, CapturedStep):
            state["capture"] = self.loop.step.state()
        if self.scheduler is not None:
            state["scheduler"] = self.scheduler.state_dict()
        if (base := getattr(trainer.model, "base_fingerprint", None)) is not None:
            state["base"] = base
        return state

    def _load(self, state: Mapping[str, Any]) -> None:
        trainer = self.trainer
        if self.start is not None:
            check_same_training(state, self._source_facts, self.config, self.start.path)
            check_same_base(state, trainer.model, self.start.path)
        trainer.strategy.load_state(state)
        if self.scheduler is None and state["config"]["training"]["lr"] != self.config.training.lr:
            self.loop.schedule.set_peaks()  # the user wants another rate than the one that was saved
        apply_changes(trainer.optimizer, state["config"]["training"], self.config.training)
        trainer.cursor = Cursor(**state["cursor"])
        trainer.last_metrics = dict(state["metrics"])
        self.loop.meter.load_state(state["meter"])
        if self.scheduler is not None and "scheduler" in state:
            self.scheduler.load_state_dict(state["scheduler"])
        if isinstance(self.loop.step, CapturedStep):
            self.loop.step.load_state(state.get("capture", {}))
        for i, callback in enumerate(trainer.callbacks):
            saved = state["callbacks"].get(f"{i}-{type(callback).__name__}")
            if saved:
                callback.load_state(saved)
        restore_generators(state["generators"])

    def _report_committed(self) -> None:
        if self.store is not None:
            for info in self.store.committed():
                self.trackers.checkpoint(info.path, info.step, info.metrics)


def _out_of_memory(error: Exception, trainer: Trainer) -> OutOfMemoryError:
    training = trainer.config.training
    parts = training.gradient_accumulation
    advice = [f"training.gradient_accumulation={parts * 2} (same training, smaller pieces)"]
    if not training.gradient_checkpointing:
        advice.append("training.gradient_checkpointing=true")
    if trainer.device.type == "cuda" and training.precision in ("fp32", "tf32"):
        advice.append("training.precision=bf16")
    first_line = str(error).split("\n")[0].split(". ")[0] or type(error).__name__
    several = trainer.strategy.world_size > 1
    return OutOfMemoryError(
        f"{trainer.device} ran out of memory at epoch {trainer.cursor.epoch}, step {trainer.cursor.step} "
        f"({first_line}); try {', or '.join(advice)}, or a smaller training.batch_size"
        f"{' (docs/troubleshooting.md#out-of-memory-on-some-gpus)' if several else ''}"
    )
