"""Named models, and the way from the `model` section of a config to a network ready to train.

To add a family: write a file with a `build(config, input_shape)` function and name it in `MODELS`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch import nn

from distributed_training.config import Config, ModelConfig
from distributed_training.config.check import did_you_mean
from distributed_training.models import custom, gpt, huggingface, mlp, resnet, vae
from distributed_training.models.base import Shape
from distributed_training.models.weights import load_pretrained
from distributed_training.runtime.errors import ConfigError, ModelError

__all__ = ["MODELS", "build_model", "get_model"]

MODELS: dict[str, Callable[[ModelConfig, Shape | None], nn.Module]] = {
    "mlp": mlp.build,
    "resnet18": resnet.build,
    "resnet34": resnet.build,
    "resnet50": resnet.build,
    "vae": vae.build,
    "gpt": gpt.build,
    "huggingface": huggingface.build,
}


def get_model(name: str) -> Callable[..., nn.Module]:
    """The builder of a named model: `get_model("resnet18")(config, input_shape=(3, 32, 32))`.

    The builder takes a `ModelConfig` or a whole `Config`, and the shape of one sample where it is known.
    """
    if name not in MODELS:
        raise ConfigError(
            f"model.name={name!r} must be one of {', '.join(MODELS)} (your own model goes into model.target)"
            f"{did_you_mean(name, MODELS)}"
        )

    def build(config: ModelConfig | Config, input_shape: Shape | None = None) -> nn.Module:
        settings = config.model if isinstance(config, Config) else config
        settings = dataclasses.replace(settings, name=name)
        model = MODELS[name](settings, input_shape)
        if settings.pretrained:
            load_pretrained(model, settings)
        return model

    return build


def build_model(config: ModelConfig, *, num_classes: int | None = None, input_shape: Shape | None = None) -> nn.Module:
    """The model a config asks for. `num_classes` and `input_shape` are the dataset's, None where it cannot tell."""
    if config.num_classes is not None and num_classes is not None and config.num_classes < num_classes:
        missing = f"label {num_classes - 1} does"
        if config.num_classes < num_classes - 1:
            missing = f"labels {config.num_classes} to {num_classes - 1} do"
        raise ModelError(
            f"model.num_classes={config.num_classes} but the dataset has {num_classes} classes: {missing} not fit; "
            f"set model.num_classes={num_classes} or leave it out"
        )
    config = dataclasses.replace(config, num_classes=config.num_classes or num_classes)
    if config.target is None:
        return get_model(config.name)(config, input_shape)
    model = custom.build(config, input_shape)
    if config.pretrained:
        load_pretrained(model, config)
    return model
