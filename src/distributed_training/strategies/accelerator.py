"""The Accelerator of Hugging Face Accelerate as the strategies here use it, and what its launcher must agree on."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from distributed_training.runtime.accelerate_launch import LauncherChoice
from distributed_training.runtime.environment import environment_for_a_while
from distributed_training.runtime.errors import ConfigError
from distributed_training.runtime.world import World
from distributed_training.strategies.base import Place, StepSettings
from distributed_training.strategies.precision import resolve_precision

logger = logging.getLogger(__name__)

MIXED_PRECISION = {"fp32": "no", "tf32": "no", "bf16": "bf16", "fp16": "fp16"}
"""What Accelerate calls our precisions."""


class OneAccelerator:
    """Makes Accelerators, one at a time: they share their state over the whole process, and it must be given back."""

    def __init__(self, world: World, device: torch.device) -> None:
        self._world, self._device = world, device
        # It imports DeepSpeed wherever that is installed, to look whether a model is one of its own.
        self._libraries = {"DS_ACCELERATOR": "cpu"} if device.type == "cpu" else {}

    def make(self, *, alone: bool, **arguments: Any) -> Any:
        """A new Accelerator in the group of ranks that there is, which it adopts.

        Args:
            alone: it is not to look for other ranks.
            arguments: what it is made with beside what every one of ours is.
        """
        from accelerate import Accelerator
        from accelerate.utils import GradientAccumulationPlugin

        self._forget()  # an earlier one of this process may have had other settings
        variables = self._libraries | ({} if alone else self._rank())
        with environment_for_a_while(ACCELERATE_TORCH_DEVICE=str(self._device), **variables):
            return Accelerator(
                # Parts of a step come weighted: it must not divide them again.
                gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
                dynamo_backend="no",  # compiled by us, or not at all
                **arguments,
            )

    def prepare(self, accelerator: Any, model: nn.Module, optimizer: Optimizer) -> nn.Module:
        """Let an Accelerator take over both; gives what the forward pass calls."""
        with environment_for_a_while(**self._libraries):
            prepared: nn.Module = accelerator.prepare(model, optimizer)[0]
        return prepared

    def close(self, accelerator: Any, ends_group: bool) -> None:
        """End the trackers that a user gave it, with `ends_group` the group of ranks too, and forget its state."""
        if accelerator is not None:
            if ends_group:
                accelerator.end_training()
            else:
                for tracker in accelerator.trackers:
                    tracker.finish()
            self._forget()

    def _forget(self) -> None:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(True)
        GradientState._reset_state()

    def _rank(self) -> dict[str, str]:
        """The environment by which Accelerate finds its rank: not every launcher makes it."""
        world = self._world
        variables = {
            "RANK": str(world.rank),
            "WORLD_SIZE": str(world.size),
            "LOCAL_RANK": str(world.local_rank),
            "LOCAL_WORLD_SIZE": str(world.local_size),
            "MASTER_ADDR": world.master or "127.0.0.1",
            "MASTER_PORT": str(world.port),
        }
        if self._device.type == "cuda" and (self._device.index or 0) != world.local_rank:
            variables["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"  # or it takes the GPU of that number
        return variables


def agree_on_place(place: Place, launcher: LauncherChoice) -> Place:
    """The place with what `accelerate launch` chose. A contradiction to the config is refused."""
    config = place.config
    if launcher.plugin not in ("none", "fsdp", "deepspeed"):
        raise ConfigError(
            f"accelerate launch was told --use_{launcher.plugin}: only fsdp and deepspeed can be used here"
        )
    if launcher.cpu and place.device.type != "cpu":
        raise ConfigError(
            f"accelerate launch was told --cpu, but the device is {place.device}: set training.device=cpu"
        )
    if launcher.others:
        raise ConfigError(
            f"accelerate launch set {launcher.others[0]}, which is not looked at: leave that option out and use "
            "training.gradient_clip, training.gradient_checkpointing, strategy.cpu_offload or strategy.deepspeed_config"
        )
    if "none" not in (config.plugin, launcher.plugin) and config.plugin != launcher.plugin:
        raise _contradiction(f"--use_{launcher.plugin}", "strategy.plugin", config.plugin)
    plugin: Any = launcher.plugin if config.plugin == "none" else config.plugin
    stage = _agree("--zero_stage", launcher.zero_stage, "strategy.zero_stage", config.zero_stage)
    file = _agree(
        "--deepspeed_config_file", launcher.deepspeed_config, "strategy.deepspeed_config", config.deepspeed_config
    )
    if launcher.accumulation not in (1, place.gradient_accumulation):
        option = f"--gradient_accumulation_steps {launcher.accumulation}"
        raise _contradiction(option, "training.gradient_accumulation", place.gradient_accumulation)
    if launcher.lost_ranks:
        logger.warning(
            "accelerate launch --cpu starts one process, whatever --num_processes says; for 2 on the CPU: "
            "accelerate launch --multi_gpu --num_processes 2 -m distributed_training train ... training.device=cpu"
        )
    return replace(place, config=replace(config, plugin=plugin, zero_stage=stage, deepspeed_config=file))


def agree_on_settings(settings: StepSettings, launcher: LauncherChoice, device: torch.device) -> StepSettings:
    """The settings with the launcher's precision where ours is auto. A contradiction is refused."""
    if launcher.compiler != "no" and not settings.compile:
        raise _contradiction(f"--dynamo_backend {launcher.compiler}", "training.compile", "false")
    if settings.precision == "auto" and launcher.precision in ("bf16", "fp16"):
        return replace(settings, precision=launcher.precision)
    own = resolve_precision(settings.precision, device)
    if launcher.precision not in ("no", MIXED_PRECISION[own]):
        raise _contradiction(f"--mixed_precision {launcher.precision}", "training.precision", settings.precision)
    return replace(settings, precision=own)


def _agree(option: str, theirs: Any, setting: str, ours: Any) -> Any:
    """The value that one of them or both name; None if neither does."""
    if None not in (theirs, ours) and theirs != ours:
        raise _contradiction(f"{option} {theirs}", setting, ours)
    return theirs if ours is None else ours


def _contradiction(told: str, setting: str, ours: Any) -> ConfigError:
    return ConfigError(
        f"accelerate launch was told {told}, but {setting}={ours}: leave one of them out, or make them equal"
    )
