"""A training step as one CUDA graph: on a fast GPU most of a step is Python launching kernels.

The whole step (forward, backward, clipping, the look for non-finite values, the update) is recorded once and replayed.
It is trusted only after some steps were run both ways from the same weights and came out the same; the training goes on
from the eager ones until then. Whatever cannot be recorded runs as ever, and the reason is said once.

What changes from step to step is read from the device: the batch from buffers that are filled before each replay, the
learning rates from tensors (in eager steps, too, so that both ways round alike), random numbers from the generator,
which is seeded for every step. Everything else is as it was when the step was recorded; so a change of the settings of
the optimizer, of the model's mode or of what is trained has the step recorded again.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distributed_training.data.base import Batch
from distributed_training.data.nested import map_tensors, tensors_in
from distributed_training.runtime.errors import ConfigError
from distributed_training.strategies.base import StepResult, Strategy
from distributed_training.training.step import TrainStep

logger = logging.getLogger(__name__)

_WARM = 3  # eager steps first: optimizers make their state, libraries choose their kernels
_TRIALS = 3  # steps that are run both ways
_GAIN = 0.97  # share of the eager time that a replay may take to be worth its memory
_DIFFERENCE = 0.02  # of an update's size: reduced precision and sums in any order stay far below, mistakes do not
_MISFITS = 20  # batches of another shape, more than half of all, after which a recording is not worth its memory
_OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


class _Unfit(Exception):
    """Why a step cannot be recorded."""


class Recording:
    """A recorded step: buffers for its inputs, the graph, and where its results appear."""

    def __init__(
        self, inputs: Any, batch: Batch, graph: torch.cuda.CUDAGraph, values: Tensor, result: StepResult
    ) -> None:
        self._graph, self._values, self._result = graph, values, result
        self._buffers = list(tensors_in(inputs))
        self._sizes = (len(self._buffers), batch.rows, batch.step_size, batch.padding)

    def fits(self, data: Any, batch: Batch) -> bool:
        """Whether a batch may take the place of the one that was recorded."""
        found = list(tensors_in(data))
        if self._sizes != (len(found), batch.rows, batch.step_size, batch.padding):
            return False
        return all(a.shape == b.shape and a.dtype == b.dtype for a, b in zip(self._buffers, found))

    def replay(self, data: Any) -> tuple[Tensor, StepResult]:
        """Run the step on other data that fits, which may still be on the host."""
        for buffer, tensor in zip(self._buffers, tensors_in(data)):
            buffer.copy_(tensor, non_blocking=True)
        self._graph.replay()
        values = self._values.clone()  # who reads them does so many steps later
        skipped = self._result.skipped
        return values[0], StepResult(self._result.norm, values[1] if isinstance(skipped, Tensor) else skipped)


class CapturedStep:
    """Runs a step by replaying it, as soon as that can be trusted."""

    def __init__(
        self, step: TrainStep, model: nn.Module, optimizer: Optimizer, strategy: Strategy, choice: str
    ) -> None:
        self._step, self._model, self._optimizer, self._strategy = step, model, optimizer, strategy
        self._must = choice == "on"
        self.wanted = choice != "off" and strategy.capturable
        """Whether to use this instead of the plain step."""
        if self._must and not self.wanted:
            raise ConfigError(
                f"training.capture=on: strategy {strategy.name} on {strategy.device.type} cannot be recorded as a CUDA "
                "graph; it takes one process and one GPU"
            )
        self._rates = [torch.zeros((), device=strategy.device) for _ in optimizer.param_groups] if self.wanted else []
        self._last_rates: list[float] = []
        self._steps = self._tried = self._misfits = 0
        self._epoch = -1
        self._settings: Any = None
        self._recording: Recording | None = None
        self._eager_time = self._replay_time = float("inf")
        self._exact = True
        self._rate_tensors = self.wanted and type(optimizer) in _OPTIMIZERS

    def __call__(self, batch: Batch, epoch: int, step: int) -> tuple[Tensor, StepResult]:
        """As `TrainStep`."""
        if not self.wanted:
            return self._eager(self._step.place(batch, epoch, step), batch)
        if epoch != self._epoch:
            self._epoch = epoch
            self._look_for_changes()
        self._steps += 1
        recording = self._recording
        if recording is not None and self._tried >= _TRIALS:
            data = self._step.place(batch, epoch, step, may_stay=True)
            if recording.fits(data, batch):
                self._set_rates()
                return recording.replay(data)
        data = self._step.place(batch, epoch, step)
        if recording is not None and not recording.fits(data, batch):
            self._misfits += 1
            if self._misfits >= _MISFITS and 2 * self._misfits > self._steps:
                self._give_up(f"{self._misfits} of {self._steps} batches were of another shape than the one recorded")
            return self._eager(data, batch)
        if self._steps <= _WARM or not self._optimizer.state:  # all steps so far may have been skipped
            return self._eager(data, batch)
        return self._trial(data, batch)

    # -- both ways

    def _eager(self, data: Any, batch: Batch) -> tuple[Tensor, StepResult]:
        self._set_rates()
        with self._rates_on_device():
            return self._step.compute(data, batch)

    def _trial(self, data: Any, batch: Batch) -> tuple[Tensor, StepResult]:
        """Run the step both ways; the eager one counts."""
        self._set_rates()
        try:
            if self._recording is None:
                self._check_fitness()
                self._recording = self._record(data, batch)
                self._settings = self._what_is_fixed()
            before, generator = self._copies(), torch.cuda.get_rng_state(self._strategy.device)
            began = self._now()
            loss, _ = self._recording.replay(data)
            self._replay_time = min(self._replay_time, self._now() - began)
        except _Unfit as why:
            self._give_up(str(why))
            return self._eager(data, batch)
        except RuntimeError as error:
            self._give_up(str(error).strip().split("\n")[0])
            return self._eager(data, batch)
        replayed = self._copies()
        for tensor, value in zip(self._state(), before):
            tensor.copy_(value)
        torch.cuda.set_rng_state(generator, self._strategy.device)
        began = self._now()
        eager_loss, result = self._eager(data, batch)
        self._eager_time = min(self._eager_time, self._now() - began)
        self._judge(before, replayed, loss, eager_loss)
        return eager_loss, result

    def _judge(self, before: list[Tensor], replayed: list[Tensor], loss: Tensor, eager_loss: Tensor) -> None:
        """Trust the recording, or not."""
        now = self._state()
        self._tried += 1
        if not all(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in zip(now, replayed)):
            self._exact = False
            off, moved = _distance(now, replayed), _distance(now, before)
            far = not (off <= _DIFFERENCE * moved)
            if far or not torch.allclose(loss.float(), eager_loss.float(), rtol=_DIFFERENCE, atol=1e-5, equal_nan=True):
                self._give_up(
                    f"replayed steps differ from eager ones (loss {float(loss):.6g}, {float(eager_loss):.6g}; weights "
                    f"by {off / max(moved, 1e-30):.2g} of an update): something in the model depends on Python's side "
                    "of a step"
                )
                return
        if self._tried < _TRIALS:
            return
        eager, replay = self._eager_time * 1000, self._replay_time * 1000
        if replay > _GAIN * eager and not self._must:
            self._give_up(f"a replay takes {replay:.3g} ms, an eager step {eager:.3g}: the GPU is busy anyway")
            return
        same = "the same bits" if self._exact else "the same within rounding"
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
        self.wanted, self._recording = False, None
        self._strategy.abandon_step()
        gc.collect()
        torch.cuda.empty_cache()

    # -- recording

    def _check_fitness(self) -> None:
        """What cannot be seen when a step is recorded."""
        if not self._rate_tensors:
            raise _Unfit(f"{type(self._optimizer).__name__} takes no learning rate from the device")
        if not all(group.get("fused") for group in self._optimizer.param_groups):
            raise _Unfit("the optimizer does not use its fused kernel (training.fused)")
        if self._optimizer._optimizer_step_pre_hooks or self._optimizer._optimizer_step_post_hooks:
            raise _Unfit("the optimizer has hooks, which a graph would not call")
        for name, module in self._model.named_modules():
            hooks = [module._forward_hooks, module._forward_pre_hooks, module._backward_hooks]
            if any(hooks) or module._backward_pre_hooks:
                raise _Unfit(f"{name or 'the model'} has hooks, which a graph would not call")
        if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in self._model.parameters()):
            raise _Unfit("parameters have hooks, which a graph would not call")

    def _record(self, data: Any, batch: Batch) -> Recording:
        inputs = map_tensors(torch.clone, data)
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[_index(self._strategy.device)]
        # Other threads may use the GPU meanwhile: those that receive batches, or write a checkpoint.
        try:
            with self._rates_on_device(capturable=True), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                loss, result = self._step.compute(inputs, batch)
                parts = [loss, result.skipped] if isinstance(result.skipped, Tensor) else [loss]
                values = torch.stack([part.float().reshape(()) for part in parts])
        except BaseException:
            # A generator does not notice that the recording it was part of came to nothing.
            generator.graphsafe_set_state(generator.clone_state())
            raise
        return Recording(inputs, batch, graph, values, result)

    def _look_for_changes(self) -> None:
        """Record anew if something changed that a recording holds fast."""
        if self._recording is not None and self._settings != self._what_is_fixed():
            self._recording, self._tried = None, 0
            self._eager_time = self._replay_time = float("inf")

    def _what_is_fixed(self) -> list[Any]:
        groups = [
            {key: value for key, value in group.items() if key not in ("params", "lr", "initial_lr")}
            for group in self._optimizer.param_groups
        ]
        weights = [(p.data_ptr(), p.requires_grad) for p in self._model.parameters()]
        return [groups, weights, [module.training for module in self._model.modules()]]

    # -- learning rates

    def _set_rates(self) -> None:
        rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        if rates != self._last_rates:
            for tensor, rate in zip(self._rates, rates):
                tensor.fill_(rate)
            self._last_rates = rates

    @contextmanager
    def _rates_on_device(self, capturable: bool = False) -> Iterator[None]:
        """The optimizer reads its learning rates from the device."""
        if not self._rate_tensors:
            yield
            return
        groups = self._optimizer.param_groups
        kept = [group["lr"] for group in groups]
        flags = [group.get("capturable") for group in groups]
        try:
            for group, rate in zip(groups, self._rates):
                group["lr"] = rate
                if capturable and group.get("capturable") is not None:
                    group["capturable"] = True
            yield
        finally:
            for group, rate, flag in zip(groups, kept, flags):
                group["lr"] = rate
                if flag is not None:
                    group["capturable"] = flag

    # -- what a step changes

    def _state(self) -> list[Tensor]:
        tensors = [*self._model.parameters(), *self._model.buffers()]
        for state in self._optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
        return [tensor.detach() for tensor in [*tensors, *self._strategy.step_state()]]

    def _copies(self) -> list[Tensor]:
        return [tensor.clone() for tensor in self._state()]

    def _now(self) -> float:
        torch.cuda.synchronize(self._strategy.device)
        return time.perf_counter()


def _distance(some: list[Tensor], others: list[Tensor]) -> float:
    """Length of the difference."""
    pairs = [(a.double().nan_to_num(), b.double().nan_to_num()) for a, b in zip(some, others) if a.is_floating_point()]
    squares = [(a - b).square().sum() for a, b in pairs]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


def _index(device: torch.device) -> int:
    return device.index if device.index is not None else torch.cuda.current_device()
