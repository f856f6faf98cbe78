"""The local loader: batches in plan order, in this process or from worker processes, from any step on."""

from __future__ import annotations

import functools
import logging
import multiprocessing
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchBase

from distributed_training.data.ahead import copied_if_large
from distributed_training.data.base import Batch, BatchSource, Dataset, Share
from distributed_training.data.loading_process import only_loads
from distributed_training.data.placing import PINNED
from distributed_training.data.plan import Plan, derive_key
from distributed_training.data.resident import make_resident
from distributed_training.data.shared_blocks import BlockReceiver, BlockSender
from distributed_training.data.steps import fetch_apart, read_steps
from distributed_training.data.torch_dataset import fetch
from distributed_training.runtime.errors import DataError
from distributed_training.runtime.forking import garbage_stays_here
from distributed_training.runtime.signals import end_with_parent

logger = logging.getLogger(__name__)

_STARTS, _BEGINS_WITHIN = 4, 10.0  # attempts, and seconds
_AHEAD = 30.0  # seconds: ending workers that hang takes time
_NOT_ASKED: Any = object()


class LoaderProcessError(DataError):
    """A loader process died, or took too long: no sample is known to be at fault."""


class Loader(BatchSource):
    """Batches of a dataset in the order of a plan. Stateless: any step of any epoch can be asked for."""

    def __init__(
        self,
        dataset: Dataset,
        plan: Plan,
        *,
        num_workers: int = 0,
        pin_memory: bool = False,
        deadline: float = 300.0,
        resident: str = "auto",
    ) -> None:
        """`resident`: as the setting `data.resident`, for the device that is set later on."""
        if len(dataset) == 0:
            raise DataError(f"{type(dataset).__name__}: the dataset is empty")
        if plan.samples != len(dataset):
            raise DataError(f"the plan is for {plan.samples} samples, but the dataset has {len(dataset)}")
        if plan.batch_size > plan.samples:
            raise DataError(
                f"batch of {plan.batch_size} is larger than the dataset of {plan.samples} samples; "
                f"set training.batch_size to {plan.samples} or less"
            )
        self.dataset, self.plan = dataset, plan
        self._pin_memory = pin_memory and torch.cuda.is_available()
        self._num_workers, self._deadline = num_workers, deadline
        self._resident, self._table = resident, _NOT_ASKED
        self._workers: DataLoader[Any] | None = None
        self._blocks: BlockReceiver | None = None
        self._cursor = _Cursor(plan.steps_per_epoch)
        self._running: Iterator[Any] = iter(())
        self._next_step: tuple[int, int] | None = None  # (epoch, step) that the workers give next, if any
        self._turn: object = None

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch."""
        return self.plan.steps_per_epoch

    def batches(self, epoch: int, start: int = 0) -> Iterator[tuple[int, Batch]]:
        """Yield (step, batch) of this epoch from step `start` on."""
        if self._table is _NOT_ASKED:
            self._table = make_resident(self.dataset, self.plan, self.device, self._resident)
        if self._table is not None:
            return self._table.batches(self.plan, self.share, epoch, start)
        self.dataset.expect(self.plan, self.share, epoch, start)
        if self._num_workers:
            if self._workers is not None and self._workers.dataset._share != self.share:  # type: ignore[attr-defined]
                self.close()  # they were made for another rank's part
            batches = self._from_workers(epoch, start)
        else:
            batches = self._in_process(epoch, start)
        on_gpu = self.device is not None and self.device.type == "cuda"
        return copied_if_large(batches, self.device) if on_gpu else batches  # type: ignore[arg-type]

    def in_order(self) -> Loader:
        """A loader of the same data with every sample once, in the dataset's order. Close it separately."""
        if not self.plan.shuffle and not self.plan.drop_last:
            return self
        plan = replace(self.plan, shuffle=False, drop_last=False)
        workers, pin = self._num_workers, self._pin_memory
        options: dict[str, Any] = {"deadline": self._deadline, "resident": self._resident}
        return Loader(self.dataset, plan, num_workers=workers, pin_memory=pin, **options)

    def describe(self) -> dict[str, Any]:
        """The plan and the data: equal for two loaders that give the same batches."""
        return {**self.plan.describe(), "dataset": self.dataset.fingerprint()}

    def close(self) -> None:
        """End the worker processes."""
        if self._workers is not None and self._workers._iterator is not None:
            self._workers._iterator._shutdown_workers()  # type: ignore[attr-defined]
            self._workers._iterator = None
        if self._blocks is not None:
            self._blocks.close()
        self._workers = self._blocks = self._turn = self._next_step = None
        self._running = iter(())
        self._table = _NOT_ASKED

    def _in_process(self, epoch: int, start: int) -> Iterator[tuple[int, Batch]]:
        memory = PINNED if self._pin_memory else None
        return read_steps(self.dataset, self.plan, self.share, epoch, start, self.steps_per_epoch, memory)

    def _from_workers(self, epoch: int, start: int) -> Iterator[tuple[int, Batch]]:
        if start >= self.steps_per_epoch:
            return
        turn = self._turn = object()
        try:
            if self._next_step != (epoch, start):
                self._send_workers_to(epoch, start)
            for step in range(start, self.steps_per_epoch):
                self._next_step = None  # until it is here
                data = next(self._running)
                self._next_step = self._cursor.after(epoch, step)
                if isinstance(data, _Failure):
                    self._next_step = None
                    logger.debug("%s", data.trace)
                    raise DataError(f"{data.message}; in a loader process, at epoch {epoch}, step {step}")
                yield step, self.share.batch(self.plan.ids(epoch, step), data)
                if self._turn is not turn:  # a newer call reads from the workers now: its batches are not ours
                    return
        except RuntimeError as error:
            raise _worker_error(error, self._patience) from error

    def _send_workers_to(self, epoch: int, start: int) -> None:
        """Have the workers load from this step on.

        Where training goes on after this epoch, so do they: while it validates and saves they load the beginning of
        the next one.
        """
        self._next_step = None  # an error on the way leaves nothing in order
        self._cursor.epoch, self._cursor.start = epoch, start
        self._cursor.end = max(epoch + 1, self.epochs or 0)
        self._running = self._start_workers() if self._workers is None else iter(self._workers)

    @property
    def _patience(self) -> float:
        """Seconds to wait for a batch. Where other ranks wait for this one, it speaks before they do: it knows more."""
        return self._deadline - min(_AHEAD, 0.4 * self._deadline) if self.share.ranks > 1 else self._deadline

    def _start_workers(self) -> Iterator[Any]:
        """Make the worker processes and see each of them begin.

        In a process with threads a fork can come up dead: up to Python 3.11 the child waits for ever if another thread
        was just then being made or ended. Ranks have such threads, so a worker that does not begin is made anew.
        """
        self._blocks = BlockReceiver()
        for attempt in range(_STARTS):
            begun = multiprocessing.Semaphore(0)
            workers = DataLoader(
                _Steps(self.dataset, self.plan, self.share, self._blocks.number),
                batch_size=None,  # an item is a whole batch already
                collate_fn=_as_it_is,  # torch's own would make lists of tuples
                sampler=self._cursor,
                num_workers=self._num_workers,
                persistent_workers=True,
                pin_memory=self._pin_memory,
                worker_init_fn=functools.partial(_begin, begun, self._die_with_training()),
                timeout=self._patience,
                generator=torch.Generator(),  # or it would draw from the training's own
            )
            with garbage_stays_here():
                batches: Any = iter(workers)
            end = time.monotonic() + _BEGINS_WITHIN * (attempt + 1)
            if all(begun.acquire(timeout=max(0.0, end - time.monotonic())) for _ in range(self._num_workers)):
                self._workers = workers
                return cast("Iterator[Any]", batches)
            logger.warning("a loader process did not begin; starting the loader processes anew")
            for process in batches._workers:
                process.kill()
            batches._shutdown_workers()
        raise DataError(f"loader processes did not begin, in {_STARTS} attempts; try data.num_workers=0")

    def _die_with_training(self) -> bool:
        """A worker has the connections of its rank, and while it lives they stay open: other ranks would not see that
        a killed one is gone. The system can only watch the thread that starts it, so this must be one that lasts."""
        return self.share.ranks > 1 and threading.current_thread() is threading.main_thread()


class _Cursor:
    """The sampler of the worker loader: which (epoch, step) come next, up to the beginning of epoch `end`."""

    def __init__(self, steps: int) -> None:
        self.steps, self.epoch, self.start, self.end = steps, 0, 0, 1

    def __iter__(self) -> Iterator[tuple[int, int]]:
        first, end = self.epoch * self.steps + self.start, self.end * self.steps
        return (divmod(at, self.steps) for at in range(first, end))

    def __len__(self) -> int:
        return (self.end - self.epoch) * self.steps - self.start

    def after(self, epoch: int, step: int) -> tuple[int, int] | None:
        """What comes after a step; None where that was the last one."""
        following = divmod(epoch * self.steps + step + 1, self.steps)
        return following if following[0] < self.end else None


@dataclass
class _Failure:
    """An error of a worker, carried as a value so that it is not buried in the loader's own traceback."""

    message: str
    trace: str


class _Steps(TorchBase[Any]):
    """Runs in the workers: computes the ids of a step by itself and fetches them. Nothing is sent but (epoch, step)."""

    def __init__(self, dataset: Dataset, plan: Plan, share: Share, receiver: int) -> None:
        self._dataset, self._plan, self._share, self._receiver = dataset, plan, share, receiver
        self._sender: BlockSender | None = None  # made in the worker

    def __getitem__(self, at: tuple[int, int]) -> Any:
        epoch, step = at
        try:
            ids, key = self._plan.ids(epoch, step), derive_key(self._plan.seed, epoch)
            return self._packed(ids[self._share.rows(len(ids))], key)
        except Exception as error:
            message = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
            return _Failure(message, traceback.format_exc())

    def _packed(self, ids: np.ndarray, key: int) -> Any:
        self._sender = self._sender or BlockSender(self._receiver)
        data = fetch_apart(self._dataset, ids, key)
        if data is not None:
            try:
                return self._sender.pack(data)
            except RuntimeError:
                pass  # samples that do not fit together: here it is said which
        return self._sender.pack(fetch(self._dataset, ids, key))


def _as_it_is(data: Any) -> Any:
    return data


def _begin(begun: Any, dies: bool, _: int) -> None:
    """The first thing that a worker does. Ctrl-C reaches every process of the terminal; only the training decides.

    `dies`: at once with the training process, without tidying up.
    """
    if dies:
        end_with_parent(signal.SIGKILL)
    begun.release()
    only_loads()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _worker_error(error: RuntimeError, deadline: float) -> Exception:
    text = str(error)
    if "timed out" in text:
        return LoaderProcessError(
            f"no batch from the loader processes within {deadline:g} s; if samples take so long, raise run.deadline"
        )
    if "DataLoader worker" in text:
        return LoaderProcessError(
            f"a loader process died ({text.splitlines()[0]}); if the machine ran out of memory, lower data.num_workers"
        )
    return error
