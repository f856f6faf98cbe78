"""The config of a job that is measured: the user's own, or one that fits the device."""

from __future__ import annotations

from typing import Any

from distributed_training.bench.options import BenchOptions
from distributed_training.config import Config
from distributed_training.config.load import config_from_layers, literal, parse_override
from distributed_training.verify.subject import Variant

_IMAGES = {"dataset": "synthetic", "args": {"samples": 4096, "shape": [3, 32, 32], "classes": 100}}
_VECTORS = {"dataset": "synthetic", "args": {"samples": 8192, "shape": [1024], "classes": 1000}}
_RESNET50 = {"model": {"name": "resnet50"}, "data": _IMAGES, "training": {"batch_size": 1024}}
_RESNET18 = {"model": {"name": "resnet18"}, "data": _IMAGES, "training": {"batch_size": 16}}
_MLP = {"model": {"name": "mlp", "args": {"hidden": [2048, 2048]}}, "data": _VECTORS, "training": {"batch_size": 64}}
_SMALL = {"model": {"name": "mlp", "args": {"hidden": [512, 512]}}, "data": _VECTORS, "training": {"batch_size": 128}}

_FORCED: dict[str, Any] = {
    "training.epochs": 1_000_000,
    "training.warmup_epochs": 0.0,
    "training.schedule": "constant",
    "training.type": "auto",  # the strategy is named
    "data.drop_last": True,
    "checkpoint.resume": "never",
    "checkpoint.every_epochs": 0,
    "checkpoint.every_steps": None,
    "early_stopping.enabled": False,
    "tracking.trackers": [],
    "run.progress": "off",
    "run.stop_after_steps": None,
}
"""Settings that make any config a training that goes on until it is told to stop and writes nothing."""


def base_config(options: BenchOptions, device: str, wide: bool = False) -> Config:
    """The config to measure on a device (`cpu` or `cuda`), batch size and model as asked for.

    `wide` takes a model whose weights are large beside its activations, so that dividing them shows.
    """
    chosen: dict[str, Any]
    if device == "cuda":
        chosen = _RESNET50
    elif options.quick:
        chosen = _SMALL
    else:
        chosen = _MLP if wide else _RESNET18
    config = options.config if options.config is not None else Config.from_dict(chosen, "dtrain bench")
    changes: dict[str, Any] = {**_FORCED, "training.device": device}
    if options.batch_size is not None:
        changes["training.batch_size"] = options.batch_size
    if options.model is not None and options.model != config.model.name:
        changes |= {"model.name": options.model, "model.args": {}}
    return config.replace(**changes)


def with_strategy(config: Config, variant: Variant) -> Config:
    """The same job under another strategy, with the settings that its name brings along."""
    words = [parse_override(f"{key}={value}") for key, value in variant.settings.items()]
    return config_from_layers([("config", literal(config.to_dict())), *[("--strategy", word) for word in words]])


def describe(config: Config) -> str:
    """The job in a few words, for the case of a figure."""
    model = config.model.target or config.model.name
    hidden = config.model.args.get("hidden")
    if hidden:
        model += f" {'-'.join(map(str, hidden))}"
    shape = config.data.args.get("shape")
    size = f" {'x'.join(map(str, shape))}" if isinstance(shape, list) else ""
    return f"{model} on {config.data.dataset}{size}"
