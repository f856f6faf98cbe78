"""What DeepSpeed is told: the user's own JSON file and our settings put together, contradictions refused.

Neither wins over the other silently. What only one of them says counts; "auto" in the file means ours.
"""

from __future__ import annotations

import copy
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from distributed_training.runtime.errors import ConfigError
from distributed_training.strategies.base import Place, StepSettings
from distributed_training.strategies.precision import resolve_precision

Json = dict[str, Any]
DEFAULT_STAGE = 2
_BUCKET = 500_000_000  # DeepSpeed's own default, in elements
_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
_OFFLOADED = {"offload_optimizer": (1, 2, 3), "offload_param": (3,)}
"""What can be kept in CPU memory, and in which ZeRO stages."""

# What would make DeepSpeed do something else than the step that the training loop asks for.
_NOT_OURS: dict[str, tuple[tuple[Any, ...], str]] = {
    "scheduler": ((), "the learning rate follows training.schedule"),
    "gradient_allreduce_op": (("mean",), "losses are weighted for the mean"),
    "managed_gradient_accumulation": ((True,), "training.gradient_accumulation decides what is a step"),
    "sequence_parallel_size": ((1,), "every rank must have samples of its own"),
    "tensor_parallel": (({},), "every rank must have samples of its own"),
    "expert_parallel": (({},), "every rank must have samples of its own"),
    "zero_optimization.zenflow": ((), "its late updates are another training"),
    "zero_optimization.offload_optimizer.device": (("none", "cpu"), "checkpoints are made from memory"),
    "zero_optimization.offload_optimizer.ratio": ((1, 1.0), "checkpoints are made from one optimizer"),
    "zero_optimization.offload_optimizer.super_offload": ((False,), "checkpoints are made from one optimizer"),
    "zero_optimization.offload_param.device": (("none", "cpu"), "checkpoints are made from memory"),
    "hybrid_engine.enabled": ((False,), "it is for generating text"),
    "data_efficiency.enabled": ((False,), "the framework's plan decides which samples make up a step"),
}
_LOSSY = ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights")


@dataclass(frozen=True)
class Combined:
    """What DeepSpeed is told, and what follows from it for us."""

    json: Json
    """The whole DeepSpeed config."""
    stage: int
    """0 to 3."""
    precision: str
    """fp32, tf32, bf16 or fp16."""
    own_precision: bool
    """Whether DeepSpeed keeps the model itself in that type (its `bf16` and `fp16` sections), instead of autocast."""
    clip: float | None
    """Largest norm of the gradient."""


def read_file(path: str | None) -> Json:
    """The user's DeepSpeed JSON; empty if there is none."""
    if path is None:
        return {}
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
        found = json.loads(text, object_pairs_hook=_no_key_twice)
    except FileNotFoundError:
        raise ConfigError(f"strategy.deepspeed_config={path}: there is no such file in {Path.cwd()}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"strategy.deepspeed_config={path} cannot be read: {error}") from None
    except ValueError as error:
        raise ConfigError(f"strategy.deepspeed_config={path} is no valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"strategy.deepspeed_config={path} must hold a JSON object, not a {type(found).__name__}")
    return found


def _no_key_twice(pairs: list[tuple[str, Any]]) -> Json:
    keys = [key for key, _ in pairs]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)} is there twice")
    return dict(pairs)


def is_lossy(user: Json) -> bool:
    """Whether the file makes DeepSpeed round what travels between ranks."""
    zero = user.get("zero_optimization")
    quantized = isinstance(zero, dict) and any(zero.get(key) is True for key in _LOSSY)
    return quantized or str(user.get("communication_data_type", "fp32")).lower() not in ("fp32", "auto", "none")


def combine(user: Json, place: Place, settings: StepSettings, optimizer: Optimizer) -> Combined:
    """The config of DeepSpeed for this training, or a ConfigError that names both values and both places."""
    file = _File(user, str(place.config.deepspeed_config))
    for path, (allowed, why) in _NOT_OURS.items():
        file.only(path, allowed, why)
    _check_batch(file, place)
    _check_optimizer(file, optimizer)
    stage = file.agree("zero_optimization.stage", place.config.zero_stage, "strategy.zero_stage", DEFAULT_STAGE)
    if stage not in (0, 1, 2, 3):
        raise ConfigError(f"{file.path}: zero_optimization.stage={stage!r} must be 0, 1, 2 or 3")
    _offload(file, place, stage)
    clip = file.agree("gradient_clipping", settings.gradient_clip, "training.gradient_clip", 0.0)
    if isinstance(clip, bool) or not isinstance(clip, (int, float)) or not 0 <= clip < math.inf:
        raise ConfigError(f"{file.path}: gradient_clipping={clip!r} must be a number from 0 on; 0 does not clip")
    if stage == 0:
        file.json["gradient_clipping"] = 0.0  # without ZeRO the update is ours, and so is the clipping
    precision, own_precision = _precision(file, place, settings)
    if own_precision and stage == 0:
        raise ConfigError(
            f"{file.path}: {precision}.enabled=true keeps the only weights in {precision} in ZeRO stage 0; set "
            f"strategy.zero_stage to 1, 2 or 3, or leave that section out: training.precision={precision} is enough"
        )
    share = -(-place.batch_size // place.world.size)
    file.json |= {"train_micro_batch_size_per_gpu": share, "gradient_accumulation_steps": 1}
    file.json.setdefault("zero_allow_untested_optimizer", True)  # SGD is one; the strategy's tests are the test
    file.json.setdefault("zero_force_ds_cpu_optimizer", False)  # torch's fused kernels serve as well
    if stage:
        sizes = [p.numel() for group in optimizer.param_groups for p in group["params"]]
        # A buffer larger than all gradients is memory for nothing.
        file.json["zero_optimization"].setdefault("reduce_bucket_size", max(2, min(_BUCKET, sum(sizes))))
    offloaded = "offload_optimizer" in file.json["zero_optimization"]
    if stage in (1, 2) and settings.nonfinite == "off" and not clip and not offloaded:
        file.json["zero_optimization"].setdefault("compute_grad_norm", False)  # nobody looks at it
    return Combined(_without_auto(file.json), stage, precision, own_precision, float(clip) or None)


def _check_batch(file: _File, place: Place) -> None:
    """DeepSpeed only reports speed by these; that they are as the user believes is checked all the same."""
    ranks, parts = place.world.size, place.gradient_accumulation
    micro = -(-place.batch_size // (ranks * parts))
    file.agree("train_batch_size", place.batch_size, "training.batch_size")
    file.agree("gradient_accumulation_steps", parts, "training.gradient_accumulation")
    file.agree(
        "train_micro_batch_size_per_gpu",
        micro,
        f"training.batch_size={place.batch_size} over {ranks} ranks and {parts} micro-batches",
    )
    file.json.pop("train_batch_size", None)  # it would have to be a multiple of the ranks


def _check_optimizer(file: _File, optimizer: Optimizer) -> None:
    """A section that describes the very optimizer of the training is fine, and not needed."""
    section = file.json.pop("optimizer", None)
    if not isinstance(section, dict):
        return
    ours, theirs = type(optimizer).__name__, section.get("type", "auto")
    if theirs != "auto" and str(theirs).lower() != ours.lower():
        raise file.conflict("optimizer.type", theirs, f"the optimizer of the training is {ours} (training.optimizer)")
    for key, value in (section.get("params") or {}).items():
        own = [group[key] for group in optimizer.param_groups if key in group]
        same = [v for v in own if (list(v) if isinstance(v, tuple) else v) == value]
        if value != "auto" and not same:
            said = f"has {key}={own[0]}" if own else f"takes no {key}"
            raise file.conflict(f"optimizer.params.{key}", value, f"the {ours} of the training {said}")


def _offload(file: _File, place: Place, stage: int) -> None:
    zero = file.json["zero_optimization"]
    for key, stages in _OFFLOADED.items():
        section = zero.get(key)
        if place.config.cpu_offload and stage in stages:
            path = f"zero_optimization.{key}.device"
            file.agree(path, "cpu", "strategy.cpu_offload=true, which means")
        elif section == "auto" or (isinstance(section, dict) and section.get("device", "auto") in ("auto", "none")):
            zero.pop(key, None)
    if place.config.cpu_offload and stage == 0:
        raise ConfigError("strategy.cpu_offload=true needs ZeRO: set strategy.zero_stage to 1, 2 or 3")


def _precision(file: _File, place: Place, settings: StepSettings) -> tuple[str, bool]:
    """(precision, whether DeepSpeed itself keeps the model in it).

    Left to us, it is torch's autocast over fp32 weights: the same arithmetic as on one device.
    """
    if "bfloat16" in file.json:  # its older name
        file.json["bf16"] = file.json.pop("bfloat16")
    said = {name: file.get(f"{name}.enabled") for name in _DTYPES}
    autocast = file.get("torch_autocast.enabled")
    chosen = [name for name, enabled in said.items() if enabled is True]
    if autocast is True:
        dtype = str(file.get("torch_autocast.dtype")).removeprefix("torch.")
        chosen += [name for name, word in _DTYPES.items() if dtype in (name, word)]
    if len(set(chosen)) > 1:
        raise ConfigError(f"{file.path}: {' and '.join(chosen)} are both enabled; choose one")
    ours = settings.precision
    if ours == "auto" and chosen:
        ours = chosen[0]
    ours = resolve_precision(ours, place.device)
    if chosen and chosen[0] != ours:
        where = f"{chosen[0]}.enabled" if said[chosen[0]] is True else "torch_autocast.enabled"
        raise file.conflict(where, True, f"training.precision={settings.precision} means {ours}")
    if ours in _DTYPES and not chosen and said[ours] is False and settings.precision != "auto":
        raise file.conflict(f"{ours}.enabled", False, f"training.precision={settings.precision}")
    own = any(said[name] is True or (said[name] == "auto" and name == ours) for name in _DTYPES)
    for name, enabled in said.items():
        if enabled is not None:
            file.put(f"{name}.enabled", own and name == ours)
    if ours in _DTYPES and not own and autocast is not True:
        # An empty list: gradients and weights travel as they are, not rounded to the smaller type.
        file.json["torch_autocast"] = {"enabled": True, "dtype": _DTYPES[ours], "lower_precision_safe_modules": []}
    return ours, own


class _File:
    """The user's file, looked at and completed."""

    def __init__(self, user: Json, path: str) -> None:
        self.json, self.path = copy.deepcopy(user), path
        if not isinstance(self.json.setdefault("zero_optimization", {}), dict):
            raise ConfigError(f"{path}: zero_optimization must be an object, not {self.json['zero_optimization']!r}")

    def get(self, path: str) -> Any:
        """The value at `a.b.c`, None if it is not there."""
        found: Any = self.json
        for key in path.split("."):
            found = found.get(key) if isinstance(found, dict) else None
        return found

    def put(self, path: str, value: Any) -> None:
        """Set the value at `a.b.c`."""
        *parents, last = path.split(".")
        section = self.json
        for key in parents:
            if not isinstance(section.get(key), dict):  # "auto", or not there
                section[key] = {}
            section = section[key]
        section[last] = value

    def agree(self, path: str, ours: Any, setting: str, otherwise: Any = None) -> Any:
        """The value that both can live with, put where it is missing. None of ours leaves it to the file."""
        theirs = self.get(path)
        if theirs is None or theirs == "auto":
            value = otherwise if ours is None else ours
        elif ours is None:
            value = theirs
        elif isinstance(theirs, bool) or theirs != ours:
            raise self.conflict(path, theirs, f"{setting} {ours}" if "=" in setting else f"{setting}={ours}")
        else:
            value = ours
        self.put(path, value)
        return value

    def only(self, path: str, allowed: tuple[Any, ...], why: str) -> None:
        """Refuse a value that the training loop cannot work with."""
        value = self.get(path)
        if value is not None and value not in ("auto", *allowed):
            remedy = f"use {' or '.join(map(repr, allowed))}" if any(allowed) else "leave it out"
            raise ConfigError(f"{self.path}: {path}={_short(value)} cannot be used here: {why}; {remedy}")

    def conflict(self, path: str, value: Any, ours: str) -> ConfigError:
        """Both values, both places, and what to do."""
        return ConfigError(
            f"{path}={_short(value)} in {self.path} (strategy.deepspeed_config), but {ours}: make them equal, or "
            f'write "auto" in the file to let the config decide'
        )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _without_auto(value: Any) -> Any:
    """What is still "auto" is DeepSpeed's default: the file was made for another library, which knows the model."""
    if isinstance(value, dict):
        return {key: _without_auto(v) for key, v in value.items() if v != "auto"}
    return value
