"""Accelerate's FSDP plugin (`strategy.plugin=fsdp`, or `accelerate launch --use_fsdp`), in its version 2."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.optim import Optimizer

from distributed_training.runtime.accelerate_launch import LauncherChoice
from distributed_training.runtime.errors import ConfigError
from distributed_training.strategies.accelerator import MIXED_PRECISION, OneAccelerator, agree_on_settings
from distributed_training.strategies.base import Place, StepSettings
from distributed_training.strategies.fsdp import FSDP
from distributed_training.strategies.sharding import find_units

logger = logging.getLogger(__name__)


class AccelerateFSDP(FSDP):
    """As `fsdp`, but Accelerate decides what is gathered together, by the options of its launcher if there are any."""

    name = "accelerate"

    def __init__(self, place: Place, launcher: LauncherChoice) -> None:
        if place.device.type == "cpu" and torch.cuda.is_available():
            raise ConfigError(
                "Accelerate's FSDP plugin takes the GPU wherever there is one, but the device is cpu: "
                "set CUDA_VISIBLE_DEVICES= in the environment, or use strategy=fsdp"
            )
        self._launcher = launcher
        super().__init__(place)
        self._accelerators = OneAccelerator(place.world, place.device)
        self.accelerator: Any = None
        """The real Accelerator, once `setup` was called with an optimizer."""

    def setup(self, model: nn.Module, optimizer: Optimizer | None, settings: StepSettings) -> nn.Module:
        settings = agree_on_settings(settings, self._launcher, self.device)
        return super().setup(model, optimizer, settings)

    def divide(self, model: nn.Module, optimizer: Optimizer | None) -> list[FSDPModule]:
        if optimizer is None:  # Accelerate divides only both together
            return super().divide(model, None)
        assert self._precision is not None
        plugin = self._make_plugin(model)
        self.accelerator = self._accelerators.make(
            alone=False,
            cpu=self.device.type == "cpu",
            mixed_precision=MIXED_PRECISION[self._precision.name],
            fsdp_plugin=plugin,
        )
        self.accelerator.scaler = self._scaler  # one and the same; Accelerate makes none on the CPU
        if self.device.type == "cpu":
            _use_on_cpu(self.accelerator, plugin)
        self._accelerators.prepare(self.accelerator, model, optimizer)
        units: list[FSDPModule] = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for unit in units:
            # Losses are weighted so that gradients add up: no mean over ranks, which Gloo does not know either.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        return units

    def backward(self, loss: Tensor) -> None:
        self.watch.begin(f"the gradients of step {self._steps}")
        self.accelerator.backward(loss)

    def teardown(self) -> None:
        self._accelerators.close(self.accelerator, ends_group=self.group.is_own)
        self.accelerator = None
        super().teardown()

    def _make_plugin(self, model: nn.Module) -> Any:
        """What is not said here comes from the launcher's options."""
        from accelerate.utils import FullyShardedDataParallelPlugin

        if self._launcher.fsdp_version == 1 and self.rank == 0:
            logger.info("accelerate launch: FSDP version 2 is used in place of 1, its default")
        low = self._low_precision(model)
        wrapping: dict[str, Any] = {}
        if not self._launcher.fsdp_wraps and (blocks := _blocks(model)):
            wrapping = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": blocks}
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            cpu_offload=True if self._offloads else None,
            activation_checkpointing=False,  # ours serves every strategy
            mixed_precision_policy=MixedPrecisionPolicy(low, torch.float32 if low else None, cast_forward_inputs=False),
            **wrapping,
        )
        plugin.cpu_ram_efficient_loading = False  # every rank has the weights already
        return plugin


def _blocks(model: nn.Module) -> list[str]:
    """Classes whose modules are all worth being gathered one by one: Accelerate chooses them by class."""
    units = set(find_units(model))
    kinds = {type(unit) for unit in units}
    fit = [kind for kind in kinds if all(m in units for m in model.modules() if isinstance(m, kind))]
    return sorted(kind.__name__ for kind in fit)


def _use_on_cpu(accelerator: Any, plugin: Any) -> None:
    """Accelerate takes its plugin only on GPUs, and would quietly do without it; torch's FSDP2 runs on the CPU too."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    for shared in (AcceleratorState._shared_state, PartialState._shared_state):
        shared["distributed_type"] = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
