"""A training step as one CUDA graph: on a fast GPU most of a step is Python launching kernels.

The whole step (forward, backward, clipping, the look for non-finite values, the update) is recorded once and replayed.
It is trusted only after some steps were run both ways from the same weights and came out the same; the training goes on
from the eager ones until then. Whatever cannot be recorded runs as ever, and the reason is said once.

What changes from step to step is read from the device: the batch from buffers that are filled before each replay, or
from data that lies there; the learning rates from tensors (in eager steps, too, so that both ways round alike); random
numbers from the generator, which is seeded for every step. Everything else is as it was when the step was recorded; so
a change of the settings of the optimizer, of the model's mode or of what is trained has the step recorded again.

In a training that is long enough the step is recorded once more with compiled kernels: see `training.kernels`.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distributed_training.data.base import Batch
from distributed_training.runtime.errors import ConfigError
from distributed_training.strategies.base import StepResult
from distributed_training.training.engine import Engine
from distributed_training.training.kernels import KernelChoice, Rounding
from distributed_training.training.rates import DeviceRates
from distributed_training.training.recording import Recording, StepRecorder, Unfit, shape_of
from distributed_training.training.step import TrainStep
from distributed_training.training.step_state import Copy, StepState

logger = logging.getLogger(__name__)

_WARM = 3  # eager steps first: optimizers make their state, libraries choose their kernels
_TRIALS = 3  # steps that are run both ways
_GAIN = 0.97  # share of the eager time that a replay may take to be worth its memory
_DIFFERENCE = 0.02  # of an update's size: reduced precision and sums in any order stay far below, mistakes do not
_SHAPES = 4  # of batches, for which steps are recorded
_MISFITS = 20  # batches of other shapes, more than half of all, after which recordings are not worth their memory


@dataclass
class _Recorded:
    """A recording, and how far it is trusted."""

    recording: Recording
    tried: int = 0
    eager: float = float("inf")
    """Seconds of a step, run eagerly."""
    replay: float = float("inf")
    exact: bool = True

    @property
    def trusted(self) -> bool:
        return self.tried >= _TRIALS


class CapturedStep:
    """Runs a step by replaying it, as soon as that can be trusted.

    Args:
        step: the plain step.
        engine: what it runs on.
        choice: `training.capture`.
        kernels: whether compiled kernels are worth their time.
        steps_left: how many steps are to come, where that is known.
    """

    def __init__(
        self, step: TrainStep, engine: Engine, choice: str, kernels: KernelChoice, steps_left: Callable[[], int | None]
    ) -> None:
        self._step, self._engine, self._strategy = step, engine, engine.strategy
        self._kernels, self._steps_left = kernels, steps_left
        self._must = choice == "on"
        strategy = engine.strategy
        self.wanted = choice != "off" and strategy.capturable
        """Whether to use this instead of the plain step."""
        if self._must and not self.wanted:
            raise ConfigError(
                f"training.capture=on: strategy {strategy.name} on {strategy.device.type} cannot be recorded as a CUDA "
                "graph; it takes one process and one GPU"
            )
        if not self.wanted:
            return
        assert engine.optimizer is not None
        self._optimizer = engine.optimizer
        self._rates = DeviceRates(self._optimizer, strategy.device)
        self._recorder = StepRecorder(step, engine, self._rates)
        self._state = StepState(engine.plain_model, self._optimizer, strategy)
        self._steps = self._misfits = 0
        self._epoch = -1
        self._settings: Any = None
        self._recorded: list[_Recorded] = []
        self._last: _Recorded | None = None
        self._seen: Counter[str] = Counter()

    def __call__(self, batch: Batch, epoch: int, step: int) -> tuple[Tensor, StepResult]:
        """As `TrainStep`."""
        if not self.wanted:
            return self._eager(self._step.place(batch, epoch, step), batch)
        if epoch != self._epoch:
            self._epoch = epoch
            self._look_for_changes()
        self._steps += 1
        rows = self._step.place(batch, epoch, step, may_stay=True)
        known = self._find(rows, batch)
        if known is not None and known.trusted:
            self._rates.set()
            return known.recording.replay(rows)
        data = self._step.place(batch, epoch, step)
        if known is None and not self._worth_recording(data, batch):
            return self._eager(data, batch)
        return self._trial(known, rows, data, batch)

    def state(self) -> dict[str, Any]:
        """What a resumed training must do as this one did."""
        return self._kernels.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on as the training did that `state` is of."""
        self._kernels.load_state(state)

    def _find(self, rows: Any, batch: Batch) -> _Recorded | None:
        if self._last is not None and self._last.recording.fits(rows, batch):
            return self._last
        self._last = next((known for known in self._recorded if known.recording.fits(rows, batch)), None)
        return self._last

    def _worth_recording(self, data: Any, batch: Batch) -> bool:
        """Whether a shape of batch that is not recorded should be."""
        if not self._optimizer.state:  # all steps so far may have been skipped
            return False
        shape = shape_of(data, batch)
        self._seen[shape] += 1
        if self._kernels.compiled_before == shape:
            return True
        if not self._recorded:
            return self._steps > _WARM
        self._misfits += 1
        if self._misfits >= _MISFITS and 2 * self._misfits > self._steps:
            shapes = len(self._recorded)
            self._give_up(f"{self._misfits} of {self._steps} batches were of other shapes than the {shapes} recorded")
            return False
        return self._seen[shape] > 1 and len(self._recorded) < _SHAPES

    # -- both ways

    def _eager(self, data: Any, batch: Batch) -> tuple[Tensor, StepResult]:
        self._rates.set()  # also when nothing is replayed any more: rates that are numbers would round otherwise
        with self._rates.on_device():
            return self._step.compute(data, batch)

    def _trial(self, known: _Recorded | None, rows: Any, data: Any, batch: Batch) -> tuple[Tensor, StepResult]:
        """Run the step both ways; the eager one counts."""
        self._rates.set()
        shape = shape_of(data, batch)
        try:
            if known is None:
                self._recorder.check_fitness()
                if self._kernels.compiled_before == shape:
                    return self._as_before(rows, data, batch)
                known = self._last = _Recorded(self._recorder.record(rows, data, batch))
                self._recorded.append(known)
                self._settings = self._recorder.what_is_fixed()
            before = self._state.copy()
            loss, seconds = self._state.timed(lambda: known.recording.replay(rows)[0])
            known.replay = min(known.replay, seconds)
        except Unfit as why:
            self._give_up(str(why))
            return self._eager(data, batch)
        except RuntimeError as error:
            self._give_up(str(error).strip().split("\n")[0])
            return self._eager(data, batch)
        replayed = self._state.copy()
        self._state.restore(before)
        (eager_loss, result), seconds = self._state.timed(lambda: self._eager(data, batch))
        known.eager = min(known.eager, seconds)
        off = replayed.distance(self._state.copy(), before)
        del before, replayed
        if self._judge(known, off, loss, eager_loss) and known is self._recorded[0]:
            self._settle(known, rows, data, batch, shape)
        return eager_loss, result

    def _judge(self, known: _Recorded, off: float, loss: Tensor, eager_loss: Tensor) -> bool:
        """Trust a recording, or not."""
        known.tried += 1
        known.exact = known.exact and off == 0
        if not (off <= _DIFFERENCE) or (off and not _close(loss, eager_loss)):
            self._give_up(
                f"replayed steps differ from eager ones (loss {float(loss):.6g}, {float(eager_loss):.6g}; weights by "
                f"{off:.2g} of an update): something in the model depends on Python's side of a step"
            )
            return False
        return known.trusted

    def _settle(self, known: _Recorded, rows: Any, data: Any, batch: Batch, shape: str) -> None:
        """How steps are to run from here on: replayed, with compiled kernels or without, or eagerly."""
        compiled = self._consider_compiling(known, rows, data, batch, shape)
        eager, replay = known.eager * 1000, known.replay * 1000
        if not compiled and replay > _GAIN * eager and not self._must:
            self._give_up(f"a replay takes {replay:.3g} ms, an eager step {eager:.3g}: the GPU is busy anyway")
            return
        same = "the same bits" if known.exact else "the same within rounding"
        logger.info(
            "steps are replayed as one CUDA graph: %.3g ms each, eager %.3g; %s (training.capture=off for eager)",
            replay,
            eager,
            same,
        )

    def _give_up(self, why: str) -> None:
        """Run eager steps from now on."""
        if self._must:
            raise ConfigError(f"training.capture=on: the step cannot be recorded as a CUDA graph: {why}")
        logger.info("steps run eagerly, not as a CUDA graph: %s", why)
        self.wanted, self._last = False, None
        self._recorded.clear()
        self._strategy.abandon_step()
        gc.collect()
        torch.cuda.empty_cache()

    # -- compiled kernels

    def _consider_compiling(self, known: _Recorded, rows: Any, data: Any, batch: Batch, shape: str) -> bool:
        """Record the step with compiled kernels, where that is worth its time. Whether they are used."""
        kernels, left = self._kernels, self._steps_left()
        if not kernels.worth_compiling(self._engine, self._optimizer, shape, known.replay, left):
            return False
        before = self._state.copy()
        try:
            compiled, seconds = self._record_compiled(rows, data, batch)
            rounding = self._compare(compiled, before, rows, data, batch)
            faster, plain = self._fastest(compiled, rows), self._fastest(known.recording, rows)
        except Exception as error:  # a compiler may raise anything
            kernels.failed(error)
            self._strategy.abandon_step()
        else:
            if kernels.judge(shape, rounding, faster, plain, seconds):
                known.recording, known.replay = compiled, faster
                return True
        finally:
            self._state.restore(before)
        return False

    def _compare(self, compiled: Recording, before: Copy, rows: Any, data: Any, batch: Batch) -> Rounding:
        """Gradients with compiled kernels and with plain ones, beside those of fp32."""
        kinds = self._state.follows_gradients

        def after(step: Callable[[], Any]) -> Copy:
            self._state.restore(before)
            step()
            return self._state.copy()

        def otherwise() -> None:
            torch.cuda.manual_seed(1)
            self._eager(data, batch)

        def exactly() -> None:
            with self._step.exactly():
                self._eager(data, batch)

        exact, eager = after(exactly), after(lambda: self._eager(data, batch))
        return Rounding(
            compiled=after(lambda: compiled.replay(rows)).distance(exact, before, kinds),
            plain=eager.distance(exact, before, kinds),
            chance=after(otherwise).distance(eager, before, kinds),
        )

    def _record_compiled(self, rows: Any, data: Any, batch: Batch) -> tuple[Recording, float]:
        """The step with compiled kernels, and how long it took to compile them."""
        before = self._state.copy()

        def warm() -> None:
            for _ in range(2):
                self._eager(data, batch)

        with self._engine.compiled():
            try:
                _, seconds = self._state.timed(warm)
            finally:
                self._state.restore(before)
            return self._recorder.record(rows, data, batch), seconds

    def _fastest(self, recording: Recording, rows: Any) -> float:
        return min(self._state.timed(lambda: recording.replay(rows))[1] for _ in range(_TRIALS))

    def _as_before(self, rows: Any, data: Any, batch: Batch) -> tuple[Tensor, StepResult]:
        """A resumed training goes on with compiled kernels, which were judged when they were first used."""
        recording, _ = self._record_compiled(rows, data, batch)
        known = self._last = _Recorded(recording, tried=_TRIALS)
        self._recorded.insert(0, known)
        self._settings = self._recorder.what_is_fixed()
        self._kernels.resumed()
        return recording.replay(rows)

    def _look_for_changes(self) -> None:
        """Record anew if something changed that a recording holds fast."""
        if self._recorded and self._settings != self._recorder.what_is_fixed():
            self._recorded.clear()
            self._last = None
            self._recorder.start_over()
            self._kernels.record_again()


def _close(some: Tensor, other: Tensor) -> bool:
    return torch.allclose(some.float(), other.float(), rtol=_DIFFERENCE, atol=1e-5, equal_nan=True)
