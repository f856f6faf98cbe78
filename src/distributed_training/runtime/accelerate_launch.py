"""What `accelerate launch` chose beside the ranks, read from the environment that it makes for each process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class LauncherChoice:
    """The options of `accelerate launch`. A value that stands for its default is the same as none at all."""

    precision: str = "no"
    """--mixed_precision: no, fp16, bf16 or fp8."""
    plugin: str = "none"
    """--use_fsdp, --use_deepspeed or --use_megatron_lm: fsdp, deepspeed, megatron_lm or none."""
    fsdp_version: int = 2
    """--fsdp_version."""
    fsdp_wraps: bool = False
    """Whether --fsdp_auto_wrap_policy says what is gathered together."""
    zero_stage: int | None = None
    """--zero_stage, with --use_deepspeed and no file of its own."""
    deepspeed_config: str | None = None
    """--deepspeed_config_file."""
    cpu: bool = False
    """--cpu."""
    accumulation: int = 1
    """--gradient_accumulation_steps."""
    compiler: str = "no"
    """--dynamo_backend."""
    others: tuple[str, ...] = ()
    """Variables of further options, which have settings of ours in their place."""
    lost_ranks: bool = False
    """Whether several processes were asked for but one was started: with --cpu it leaves the others to mpirun."""


# Set only for options that were given; the values below them stand for nothing asked.
_OTHERS = (
    "ACCELERATE_GRADIENT_CLIPPING",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT",
    "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
    "ACCELERATE_USE_PARALLELISM_CONFIG",
    "FSDP_ACTIVATION_CHECKPOINTING",
)
_NOTHING = ("", "none", "false", "auto", "0", "0.0")


def read_launcher_choice(environment: Mapping[str, str] | None = None) -> LauncherChoice:
    """The choice of the `accelerate launch` that started this process; all defaults if none did."""
    v = os.environ if environment is None else environment
    plugins = [name for name in ("fsdp", "deepspeed", "megatron_lm") if _true(v, f"ACCELERATE_USE_{name.upper()}")]
    deepspeed = "deepspeed" in plugins
    file = v.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none") if deepspeed else "none"
    stage = v.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "") if deepspeed and file == "none" else ""
    steps = v.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    cpu = _true(v, "ACCELERATE_USE_CPU")
    return LauncherChoice(
        precision=v.get("ACCELERATE_MIXED_PRECISION", "no").lower(),
        plugin=plugins[0] if plugins else "none",
        fsdp_version=1 if "fsdp" in plugins and v.get("FSDP_VERSION", "1") == "1" else 2,
        fsdp_wraps="FSDP_AUTO_WRAP_POLICY" in v,
        zero_stage=int(stage) if stage.isdigit() else None,
        deepspeed_config=file if file != "none" else None,
        cpu=cpu,
        accumulation=int(steps) if steps.isdigit() else 1,
        compiler=v.get("ACCELERATE_DYNAMO_BACKEND", "no").lower(),
        others=tuple(f"{name}={v[name]}" for name in _OTHERS if v.get(name, "").lower() not in _NOTHING),
        lost_ranks=cpu and "MASTER_ADDR" in v and "RANK" not in v,
    )


def _true(variables: Mapping[str, str], name: str) -> bool:
    return variables.get(name, "false").lower() in ("true", "1", "yes")
