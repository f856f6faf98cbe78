"""A recorded step: where its inputs lie, the CUDA graph, and where its results appear."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from distributed_training.data.base import Batch
from distributed_training.data.nested import map_tensors, tensors_in
from distributed_training.data.resident import ResidentRows
from distributed_training.strategies.base import StepResult
from distributed_training.training.engine import Engine
from distributed_training.training.rates import DeviceRates
from distributed_training.training.step import TrainStep


class Inputs(Protocol):
    """How a batch comes to the place where a recorded step reads it."""

    def fits(self, data: Any, batch: Batch) -> bool:
        """Whether a batch may take the place of the one that was recorded."""

    def set(self, data: Any) -> None:
        """Bring a batch that fits to its place, before a replay."""

    def read(self) -> Any:
        """The batch, while the step is recorded."""

    def done(self) -> None:
        """What the device does at the end of the step, while it is recorded."""


class Buffers:
    """Inputs that are copied to a fixed place; they may come from the host, and be transformed by the step."""

    def __init__(self, data: Any, batch: Batch, engine: Engine) -> None:
        self._engine = engine
        self._data = map_tensors(lambda tensor: tensor.to(engine.strategy.device, copy=True), data)
        self._buffers = list(tensors_in(self._data))
        self._sizes = (len(self._buffers), batch.rows, batch.step_size, batch.padding)

    def fits(self, data: Any, batch: Batch) -> bool:
        found = list(tensors_in(data))
        if self._sizes != (len(found), batch.rows, batch.step_size, batch.padding):
            return False
        return all(a.shape == b.shape and a.dtype == b.dtype for a, b in zip(self._buffers, found))

    def set(self, data: Any) -> None:
        for buffer, tensor in zip(self._buffers, tensors_in(data)):
            buffer.copy_(tensor, non_blocking=True)

    def read(self) -> Any:
        return self._engine.transform(self._data) if self._engine.transforms_alone else self._data

    def done(self) -> None:
        pass


class Window:
    """Inputs that the step gathers by itself from data on the device. It knows its place and moves on by itself."""

    def __init__(self, rows: ResidentRows, batch: Batch, engine: Engine) -> None:
        self._rows, self._engine = rows, engine
        self._sizes = (batch.rows, batch.step_size, batch.padding)
        self._first = torch.arange(rows.count, device=rows.table.device)
        self._places = self._first.clone()
        self._next = 0

    def fits(self, data: Any, batch: Batch) -> bool:
        if not isinstance(data, ResidentRows) or data.table is not self._rows.table:
            return False
        return self._sizes == (batch.rows, batch.step_size, batch.padding)

    def set(self, data: Any) -> None:
        if data.start != self._next:
            torch.add(self._first, data.start, out=self._places)
        self._next = data.start + data.count

    def read(self) -> Any:
        table = self._rows.table
        return self._engine.transform(table.gather(table.ids.index_select(0, self._places)))

    def done(self) -> None:
        self._places += self._rows.count


class Recording:
    """A step that can be replayed on any batch that fits."""

    def __init__(self, inputs: Inputs, graph: torch.cuda.CUDAGraph, values: Tensor, result: StepResult) -> None:
        self._inputs, self._graph, self._values, self._result = inputs, graph, values, result
        self.fits = inputs.fits

    def replay(self, data: Any) -> tuple[Tensor, StepResult]:
        """Run the step on a batch that fits."""
        self._inputs.set(data)
        self._graph.replay()
        values = self._values.clone()  # who reads them does so many steps later
        skipped = self._result.skipped
        return values[0], StepResult(self._result.norm, values[1] if isinstance(skipped, Tensor) else skipped)


class Unfit(Exception):
    """Why a step cannot be recorded."""


class StepRecorder:
    """Records the steps of one training. Its recordings share their memory."""

    def __init__(self, step: TrainStep, engine: Engine, rates: DeviceRates) -> None:
        assert engine.optimizer is not None
        self._step, self._engine, self._rates = step, engine, rates
        self._model, self._optimizer, self._strategy = engine.plain_model, engine.optimizer, engine.strategy
        self._pool = torch.cuda.graph_pool_handle()

    def start_over(self) -> None:
        """No recording is used any more: the next one gets memory of its own.

        Graphs that are gone leave their memory unusable for new ones as long as a single tensor of theirs is held.
        """
        self._pool = torch.cuda.graph_pool_handle()

    def check_fitness(self) -> None:
        """What cannot be seen when a step is recorded."""
        if not self._rates.usable:
            raise Unfit(f"{type(self._optimizer).__name__} takes no learning rate from the device")
        if not all(group.get("fused") for group in self._optimizer.param_groups):
            raise Unfit("the optimizer does not use its fused kernel (training.fused)")
        if self._optimizer._optimizer_step_pre_hooks or self._optimizer._optimizer_step_post_hooks:
            raise Unfit("the optimizer has hooks, which a graph would not call")
        for name, module in self._model.named_modules():
            hooks = [module._forward_hooks, module._forward_pre_hooks, module._backward_hooks]
            if any(hooks) or module._backward_pre_hooks:
                raise Unfit(f"{name or 'the model'} has hooks, which a graph would not call")
        if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in self._model.parameters()):
            raise Unfit("parameters have hooks, which a graph would not call")

    def record(self, rows: Any, data: Any, batch: Batch) -> Recording:
        """Record the step of a batch, given as it came (`rows`) and as it lies on the device (`data`)."""
        inputs = make_inputs(rows, data, batch, self._engine)
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[_index(self._strategy.device)]
        # Other threads may use the GPU meanwhile: those that receive batches, or write a checkpoint.
        recording = torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local")
        try:
            with self._rates.on_device(capturable=True), recording:
                loss, result = self._step.compute(inputs.read(), batch)
                parts = [loss, result.skipped] if isinstance(result.skipped, Tensor) else [loss]
                values = torch.stack([part.float().reshape(()) for part in parts])
                inputs.done()
        except BaseException:
            # A generator does not notice that the recording it was part of came to nothing.
            generator.graphsafe_set_state(generator.clone_state())
            raise
        return Recording(inputs, graph, values, result)

    def what_is_fixed(self) -> list[Any]:
        """What a recording holds fast: if it changes, the step is to be recorded again."""
        groups = [
            {key: value for key, value in group.items() if key not in ("params", "lr", "initial_lr")}
            for group in self._optimizer.param_groups
        ]
        weights = [(p.data_ptr(), p.requires_grad) for p in self._model.parameters()]
        return [groups, weights, [module.training for module in self._model.modules()]]


def make_inputs(rows: Any, data: Any, batch: Batch, engine: Engine) -> Inputs:
    """Where the inputs of a recorded step come from: `rows` as the step was given them, `data` placed on the device."""
    if not engine.transforms_alone:
        return Buffers(data, batch, engine)
    return Window(rows, batch, engine) if isinstance(rows, ResidentRows) else Buffers(rows, batch, engine)


def shape_of(data: Any, batch: Batch) -> str:
    """Equal for batches that fit one recording."""
    shapes = [f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in tensors_in(data)]
    return f"{' '.join(shapes)} {batch.rows}/{batch.step_size}{' padding' if batch.padding else ''}"


def _index(device: torch.device) -> int:
    return device.index if device.index is not None else torch.cuda.current_device()
