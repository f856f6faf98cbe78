"""Hugging Face Accelerate: its `Accelerator` prepares model and optimizer and runs the backward pass."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from distributed_training.runtime.accelerate_launch import LauncherChoice, read_launcher_choice
from distributed_training.runtime.imports import import_object, require
from distributed_training.strategies.accelerator import (
    MIXED_PRECISION,
    OneAccelerator,
    agree_on_place,
    agree_on_settings,
)
from distributed_training.strategies.base import Place, StepSettings, Strategy
from distributed_training.strategies.batchnorm import synchronise_batchnorm
from distributed_training.strategies.compression import compress_gradients
from distributed_training.strategies.distributed import Distributed

# What Accelerate hands the model to.
_PLUGINS = {
    "none": "distributed_training.strategies.accelerate:Accelerate",
    "fsdp": "distributed_training.strategies.accelerate_fsdp:AccelerateFSDP",
    "deepspeed": "distributed_training.strategies.accelerate_deepspeed:AccelerateDeepSpeed",
}


def make_accelerate(place: Place) -> Strategy:
    """Accelerate with the plugin that the config or `accelerate launch` names."""
    require("accelerate", "accelerate", "strategy=accelerate")
    launcher = read_launcher_choice()
    place = agree_on_place(place, launcher)
    strategy: Strategy = import_object(_PLUGINS[place.config.plugin], "strategy.plugin")(place, launcher)
    return strategy


class Accelerate(Distributed):
    """Accelerate without a plugin: it wraps the model in DistributedDataParallel, or leaves it alone in one process."""

    name = "accelerate"

    def __init__(self, place: Place, launcher: LauncherChoice) -> None:
        self._launcher = launcher
        super().__init__(place)
        self.exact = place.config.compression == "none"
        self._accelerators = OneAccelerator(place.world, place.device)
        self.accelerator: Any = None
        """The real Accelerator, from `setup` on, for all else that it can do."""

    def setup(self, model: nn.Module, optimizer: Optimizer | None, settings: StepSettings) -> nn.Module:
        settings = agree_on_settings(settings, self._launcher, self.device)
        if self.config.sync_batchnorm:
            synchronise_batchnorm(model, self)
        self.start_alike(model)
        self._restore_forward()
        compiled = super().setup(model, optimizer, settings)
        self.accelerator = self._accelerators.make(
            alone=self.world_size == 1,
            cpu=self.device.type == "cpu",
            mixed_precision=MIXED_PRECISION[settings.precision],
            kwargs_handlers=[self._ddp_settings()],
        )
        self.accelerator.scaler = self._scaler  # one and the same; Accelerate makes none on the CPU
        if optimizer is None:
            evaluated: nn.Module = self.accelerator.prepare_model(compiled, evaluation_mode=True)
            return evaluated
        self._prepared = self._accelerators.prepare(self.accelerator, compiled, optimizer)
        if isinstance(self._prepared, DistributedDataParallel):
            compress_gradients(self._prepared, self.config, self.group)
        return self._prepared

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self.accelerator.no_sync(self._prepared)

    def backward(self, loss: Tensor) -> None:
        self.watch.begin(f"the gradients of step {self._steps}")
        self.accelerator.backward(loss * self.world_size)  # DistributedDataParallel divides by it

    def teardown(self) -> None:
        self._restore_forward()
        self._accelerators.close(self.accelerator, ends_group=self.group.is_own)
        self.accelerator = None
        super().teardown()

    def _restore_forward(self) -> None:
        """Undo what Accelerate does to a model for mixed precision: it puts its autocast around `forward`."""
        model = getattr(self, "_model", None)
        original = vars(model).pop("_original_forward", None) if model is not None else None
        if original is not None:
            model.forward = original  # type: ignore[union-attr]

    def _ddp_settings(self) -> Any:
        from accelerate.utils import DistributedDataParallelKwargs

        return DistributedDataParallelKwargs(
            bucket_cap_mb=self.config.bucket_mb,
            gradient_as_bucket_view=True,
            static_graph=self.config.static_graph,
            find_unused_parameters=self.config.find_unused_parameters,
        )
