"""Trained weights from a file, or torchvision's for the resnets, put into a fresh model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distributed_training.config import ModelConfig
from distributed_training.models.resnet import DEPTHS
from distributed_training.runtime.errors import ConfigError, ModelError
from distributed_training.runtime.imports import require

logger = logging.getLogger(__name__)

# What wrappers put in front of names: DataParallel and DDP, torch.compile.
WRAPPER_PREFIXES = ("module.", "_orig_mod.")


def load_pretrained(model: nn.Module, config: ModelConfig) -> None:
    """Fill the model with the weights that `model.pretrained` means. Only a head of another size stays fresh."""
    if config.weights is not None:
        source, tensors = config.weights, read_weights(Path(config.weights))
    elif config.target is None and config.name in DEPTHS:
        source, tensors = f"torchvision's {config.name}", _torchvision_weights(config.name)
    else:
        raise ConfigError(
            f"model.pretrained=True needs a file in model.weights: there are no weights to download for "
            f"{config.target or config.name}"
        )
    fresh = _head_of_other_size(model, tensors)
    if fresh:
        logger.warning("%s: head for another number of classes; here it starts from random: %s", source, sorted(fresh))
        tensors = {name: value for name, value in tensors.items() if name not in fresh}
    own = model.state_dict()
    problems = [
        f"{name} is {tuple(tensors[name].shape)} there and {tuple(own[name].shape)} here"
        for name in own.keys() & tensors.keys()
        if own[name].shape != tensors[name].shape
    ]
    if not problems:
        # Not strict: torch itself knows which missing names are fine, such as batch counts in old files.
        result = model.load_state_dict(tensors, strict=False)
        problems = [f"{name} is missing there" for name in result.missing_keys if name not in fresh]
        problems += [f"{name} is unknown here" for name in result.unexpected_keys]
    if problems:
        shown = ", ".join(sorted(problems)[:5]) + (f" and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise ModelError(f"weights of {source} do not fit {config.target or config.name}: {shown}")


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors in a .safetensors, .pth or .pt file, by their names in the plain model. Runs no code from it."""
    if path.suffix not in (".safetensors", ".pth", ".pt"):
        raise ConfigError(f"model.weights={path} must end in .safetensors, .pth or .pt")
    if not path.is_file():
        raise ModelError(f"model.weights={path}: no such file")
    try:
        loaded: Any
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            loaded = load_file(path)
        else:
            loaded = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # each format has its own classes for damage; unsafe pickles end here too
        reason = str(error).strip().split("\n")[0]
        raise ModelError(f"model.weights={path}: damaged, or holds more than tensors: {reason}") from None
    for wrapper in ("state_dict", "model"):
        if isinstance(loaded, Mapping) and isinstance(loaded.get(wrapper), Mapping):
            loaded = loaded[wrapper]
    if not isinstance(loaded, Mapping) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise ModelError(f"model.weights={path}: must hold a state dict, names and tensors, and nothing else")
    return {_plain_name(str(name)): value for name, value in loaded.items()}


def _plain_name(name: str) -> str:
    while name.startswith(WRAPPER_PREFIXES):
        name = name.partition(".")[2]
    return name


def _torchvision_weights(name: str) -> dict[str, Tensor]:
    models = require("torchvision.models", "vision", f"model.pretrained=True for {name} without model.weights")
    try:
        return dict(models.get_model_weights(name).DEFAULT.get_state_dict(check_hash=True, weights_only=True))
    except OSError as error:  # URLError is one
        raise ModelError(
            f"torchvision's weights for {name} cannot be downloaded: {error}; put a file into model.weights"
        ) from None


def _head_of_other_size(model: nn.Module, tensors: dict[str, Tensor]) -> set[str]:
    """Names in the model's head, if the weights come with a head that differs from it only in its outputs."""
    prefix = f"{getattr(model, 'head_name', None)}."
    own = {name: value.shape for name, value in model.state_dict().items() if name.startswith(prefix)}
    theirs = {name: value.shape for name, value in tensors.items() if name.startswith(prefix)}
    same_inputs = own.keys() == theirs.keys() and all(own[name][1:] == theirs[name][1:] for name in own)
    return set(own) if same_inputs and own != theirs else set()
