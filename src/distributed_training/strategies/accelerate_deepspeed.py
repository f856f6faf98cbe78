"""Accelerate's DeepSpeed plugin (`strategy.plugin=deepspeed`, or `accelerate launch --use_deepspeed`)."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from distributed_training.runtime.accelerate_launch import LauncherChoice
from distributed_training.strategies.accelerator import OneAccelerator, agree_on_settings
from distributed_training.strategies.base import Place, StepSettings
from distributed_training.strategies.deepspeed import DeepSpeed
from distributed_training.strategies.deepspeed_settings import Combined


class AccelerateDeepSpeed(DeepSpeed):
    """As `deepspeed`, but Accelerate makes the engine.

    Its own `backward` would take the step at once, before anybody could tell whether it was skipped; so backward and
    step go straight to the engine.
    """

    name = "accelerate"

    def __init__(self, place: Place, launcher: LauncherChoice) -> None:
        self._launcher = launcher
        super().__init__(place)
        self._accelerators = OneAccelerator(place.world, place.device)
        self.accelerator: Any = None
        """The real Accelerator, once `setup` was called with an optimizer."""

    def setup(self, model: nn.Module, optimizer: Optimizer | None, settings: StepSettings) -> nn.Module:
        settings = agree_on_settings(settings, self._launcher, self.device)
        return super().setup(model, optimizer, settings)

    def initialize(self, model: nn.Module, optimizer: Optimizer, told: Combined) -> Any:
        from accelerate.utils import InitProcessGroupKwargs

        self.accelerator = self._accelerators.make(
            alone=False,
            mixed_precision="no",  # DeepSpeed is told itself
            deepspeed_plugin=_make_plugin(told),
            # Without it Accelerate believes to be alone on the CPU.
            kwargs_handlers=[InitProcessGroupKwargs(backend=self.group.backend)],
        )
        return self._accelerators.prepare(self.accelerator, model, optimizer)

    def teardown(self) -> None:
        self._accelerators.close(self.accelerator, ends_group=False)  # DeepSpeed ends it, with those it made of it
        self.accelerator = None
        super().teardown()


def _make_plugin(told: Combined) -> Any:
    from accelerate.utils import DeepSpeedPlugin

    class Plugin(DeepSpeedPlugin):
        def set_deepspeed_weakref(self) -> None:
            """Not done: it would tell transformers to divide, by all ranks together, every model loaded from now on.

            The one that is trained is there already, and rank 0 alone may load others, to merge adapters or to look at
            what was saved.
            """

    return Plugin(hf_ds_config=told.json, zero3_init_flag=False)
