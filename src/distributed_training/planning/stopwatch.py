"""A callback that measures a training from inside: memory first, then time, then when each gradient is ready.

It watches the real loop with the real step; nothing is run that `dtrain train` would not run.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from distributed_training.bench.turn_worker import Orders
from distributed_training.planning.profile import BACKWARD_OVER, UPDATE
from distributed_training.runtime.meters import Meter
from distributed_training.training.callbacks import Callback
from distributed_training.training.trainer import Trainer

MEMORY_STEPS = 3  # the first makes the optimizer's state, the second what is made once all state is there
_READY_STEPS = 2
_WAKING = 1  # steps after a sleep that are not timed
# What a mark ends.
_PARTS = {
    "place": "wait",
    "placed": "place",
    "backward": "forward",
    "backward_end": "backward",
    "update": "between",
    "update_end": "update",
    "end": "loop",
}


@dataclass
class Found:
    """What was measured of one training."""

    peak: float = 0.0
    """Bytes at most in a step, beyond what there was before the model."""
    timeline: list[tuple[int, float]] = field(default_factory=list)
    """(parameter, bytes at most until its gradient was there), in the order of the backward pass; -1: the update."""
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds of the parts of a step: wait (data), place, forward, backward, between, update, loop."""
    step: float = 0.0
    """Seconds of a whole step: the middle one."""
    series: list[float] = field(default_factory=list)
    """Seconds of every step that was timed."""
    spread: float = 0.0
    """Distance between the quartiles of the steps, as a share of the middle."""
    ready: list[tuple[int, float]] = field(default_factory=list)
    """(parameter, share of the backward pass that was over when its gradient was there)."""
    steps: int = 0
    """Steps that were timed."""
    had_core: float = 1.0
    """Share of that time in which the training thread ran: less on a machine with other work, on a CPU."""


class Clock:
    """Marks in time: the host's clock on a CPU, events in the stream of a GPU, read when all is over."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []

    def mark(self, name: str) -> None:
        """Now, on the device."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((name, event))
        else:
            self._marks.append((name, time.perf_counter()))

    def read(self) -> list[tuple[str, float]]:
        """(name, seconds since the first mark). Waits for the device; forgets the marks."""
        marks, self._marks = self._marks, []
        if not marks:
            return []
        if self._cuda:
            torch.cuda.synchronize()
            first = marks[0][1]
            return [(name, first.elapsed_time(event) / 1e3) for name, event in marks]
        return [(name, moment - marks[0][1]) for name, moment in marks]


class Stopwatch(Callback):
    """Measures and then stops the training."""

    def __init__(
        self,
        meter: Meter | None,
        *,
        seconds: float = 1.0,
        steps: int | None = None,
        warmup: int = 2,
        details: bool = True,
        timed: bool = True,
        memory_steps: int = MEMORY_STEPS,
        before_timing: Callable[[], None] = lambda: None,
        turns: Orders | None = None,
    ) -> None:
        """
        Args:
            meter: measures memory in the first steps; None leaves that out.
            seconds: how long to time steps, where `steps` is not given.
            steps: how many to time: the same on all ranks.
            warmup: steps before those.
            details: parts of a step and single gradients too; not possible where a step is one CUDA graph.
            timed: False ends when memory has been measured.
            memory_steps: of which the last one is measured.
            before_timing: called once memory has been measured.
            turns: time steps again and again, each time that it is our turn.
        """
        self.found = Found()
        self._meter, self._seconds, self._steps, self._warmup = meter, seconds, steps, warmup
        self._details, self._timed, self._before_timing = details, timed, before_timing
        self._turns, self._awake = turns, False
        self._done, self._over = 0, False
        self._timing = 0 if meter is None else memory_steps
        self._ends_at: float | None = None
        self._began = 0.0, 0.0
        self._readying: int | None = None
        self._hooks: list[Any] = []
        self._wrapped: list[tuple[Any, str]] = []

    def on_train_start(self, trainer: Trainer) -> None:
        self._clock = Clock(trainer.device)
        self._parameters: list[nn.Parameter] = [p for p in trainer.model.parameters() if p.requires_grad]
        if not self._timing:
            self._before_timing()

    def on_step_end(self, trainer: Trainer, step: int, loss: Tensor) -> None:
        if self._over:  # other ranks have to agree to stop: a few more steps may come
            return
        self._done += 1
        if self._done <= self._timing:
            self._memory_step(trainer)
        elif self._readying is not None:
            self._ready_step(trainer)
        else:
            self._timed_step(trainer)

    def on_train_end(self, trainer: Trainer, status: str) -> None:
        self._release()

    def _memory_step(self, trainer: Trainer) -> None:
        assert self._meter is not None
        if self._done == self._timing - 1:
            self._meter.peak()
            if self._details:
                self._hook(self._look)
                self._wrap(trainer.strategy, "backward", lambda: None, self._look_at_the_end)
                self._wrap(trainer.strategy, "step", lambda: None, lambda: self._look(UPDATE))
        elif self._done == self._timing:
            self._look(UPDATE)
            self.found.peak = max(peak for _, peak in self.found.timeline)
            self._release()
            if self._timed:
                self._before_timing()
            else:
                self._stop(trainer)

    def _look(self, number: int) -> None:
        assert self._meter is not None
        self.found.timeline.append((number, self._meter.peak()))

    def _look_at_the_end(self) -> None:
        """Of the backward pass: the most since the last gradient, and then what is there."""
        self._look(UPDATE)
        self._look(BACKWARD_OVER)

    def _timed_step(self, trainer: Trainer) -> None:
        since = self._done - self._timing
        if since < self._warmup:
            return
        if since == self._warmup:
            if self._turns is not None and not self._awake:
                self._turns.ready(peak=self.found.peak)
                self._next_turn(trainer)
                return
            if self._details:
                self._mark_parts(trainer)
            self._clock.mark("end")
            self._ends_at = time.monotonic() + self._seconds
            self._began = time.perf_counter(), time.thread_time()
            return
        self._clock.mark("end")
        timed = since - self._warmup
        enough = timed >= self._steps if self._steps is not None else self._time_is_over(timed)
        if not enough:
            return
        whole, own = time.perf_counter() - self._began[0], time.thread_time() - self._began[1]
        self.found.had_core = own / whole
        self._read_times()
        self._release()
        if self._turns is not None:
            alone = trainer.strategy.world_size == 1
            self._turns.answer(step=self.found.step, **({"series": self.found.series} if alone else {}))
            self._next_turn(trainer)
        elif self._details and trainer.strategy.world_size == 1:
            self._readying = 0
            self._hook(lambda number: self._clock.mark(str(number)))
            self._wrap(trainer.strategy, "backward", lambda: self._clock.mark("begin"), lambda: self._clock.mark("end"))
        else:
            self._stop(trainer)

    def _next_turn(self, trainer: Trainer) -> None:
        """Sleep here, between two steps, until it is our turn."""
        assert self._turns is not None
        if self._turns.wait() is not None:
            self._awake, self._timing = True, self._done - self._warmup + _WAKING
        else:
            self._stop(trainer)

    def _time_is_over(self, timed: int) -> bool:
        assert self._ends_at is not None
        return (timed >= 3 and time.monotonic() >= self._ends_at) or timed >= 2000

    def _mark_parts(self, trainer: Trainer) -> None:
        mark = self._clock.mark
        self._wrap(trainer.engine, "place", lambda: mark("place"), lambda: mark("placed"))
        self._wrap(trainer.strategy, "backward", lambda: mark("backward"), lambda: mark("backward_end"))
        self._wrap(trainer.strategy, "step", lambda: mark("update"), lambda: mark("update_end"))

    def _read_times(self) -> None:
        marks = self._clock.read()
        steps: list[dict[str, float]] = []
        current: dict[str, float] = {}
        for (_, before), (name, now) in itertools.pairwise(marks):
            current[_PARTS[name]] = current.get(_PARTS[name], 0.0) + now - before
            if name == "end":
                steps.append(current)
                current = {}
        totals = [sum(step.values()) for step in steps]
        self.found.steps, self.found.step, self.found.series = len(totals), statistics.median(totals), totals
        if len(totals) > 3:
            low, _, high = statistics.quantiles(totals, n=4, method="inclusive")
            self.found.spread = (high - low) / self.found.step
        names = {name for step in steps for name in step}
        if self._details:
            self.found.parts = {name: statistics.median(step.get(name, 0.0) for step in steps) for name in names}

    def _ready_step(self, trainer: Trainer) -> None:
        assert self._readying is not None
        self._readying += 1
        marks = self._clock.read()
        if marks and marks[-1][1] > 0:
            whole = marks[-1][1]
            self.found.ready = [(int(name), at / whole) for name, at in marks if name not in ("begin", "end")]
        if self._readying == _READY_STEPS:
            self._stop(trainer)

    def _stop(self, trainer: Trainer) -> None:
        self._over = True
        self._release()
        trainer.stop("measured")

    def _hook(self, call: Callable[[int], None]) -> None:
        for number, parameter in enumerate(self._parameters):
            self._hooks.append(parameter.register_post_accumulate_grad_hook(lambda _, n=number: call(n)))

    def _wrap(self, owner: Any, name: str, before: Callable[[], None], after: Callable[[], None]) -> None:
        inner = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            before()
            value = inner(*args, **kwargs)
            after()
            return value

        setattr(owner, name, wrapped)
        self._wrapped.append((owner, name))

    def _release(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for owner, name in self._wrapped:
            vars(owner).pop(name, None)
        self._hooks, self._wrapped = [], []
