"""From the `model` section to a network: names, classes, arguments."""

from __future__ import annotations

import pytest
from torch import nn

from distributed_training.config import Config, ModelConfig
from distributed_training.models import MODELS, build_model, get_model
from distributed_training.runtime.errors import ConfigError, ModelError


@pytest.mark.parametrize("name", [name for name in MODELS if name != "huggingface"])  # needs a checkpoint
def test_get_model_takes_a_config_or_its_model_section(name: str) -> None:
    config = Config(model=ModelConfig(num_classes=10))
    for given in (config, config.model):
        model = get_model(name)(given, input_shape=(3, 8, 8))
        assert isinstance(model, nn.Module)
        assert callable(model.gradient_checkpointing_enable)


def test_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"^model\.name='resnet8' must be one of mlp, .*; did you mean resnet18\?$"):
        get_model("resnet8")
    with pytest.raises(ConfigError, match=r"^model\.name='resnet8'"):
        build_model(ModelConfig(name="resnet8"))


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("mlp", {"hiden": [8]}, "unknown setting model.args.hiden of mlp; did you mean hidden?"),
        ("gpt", {"zzz": 8}, "unknown setting model.args.zzz of gpt; there are vocab_size, context,"),
        ("resnet18", {"width": 8}, "unknown setting model.args.width of resnet18; there are in_channels, small_images"),
        ("vae", {"laten": 8}, "unknown setting model.args.laten of vae; did you mean latent?"),
        ("mlp", {"hidden": "wide"}, "model.args.hidden[0]='wide' must be a whole number"),
        ("mlp", {"hidden": [0]}, "model.args.hidden=0 must be greater than 0"),
        ("mlp", {"dropout": 2}, "model.args.dropout=2.0 must be between 0 and 1"),
        ("vae", {"latent": 0}, "model.args.latent=0 must be greater than 0"),
        ("resnet18", {"in_channels": 0}, "model.args.in_channels=0 must be greater than 0"),
        ("gpt", {"layers": 0}, "model.args.layers=0 must be greater than 0"),
        ("gpt", {"width": 10, "heads": 4}, "model.args.width=10 must be a multiple of model.args.heads=4"),
    ],
)
def test_wrong_argument_is_named(name: str, args: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        get_model(name)(ModelConfig(num_classes=2, args=args), (3, 8, 8))
    assert str(caught.value).startswith(message)


def test_num_classes_from_dataset_or_config() -> None:
    def outputs(configured: int | None, dataset: int | None) -> int:
        return build_model(ModelConfig(num_classes=configured), num_classes=dataset, input_shape=(4,)).head.out_features

    assert outputs(None, 10) == 10
    assert outputs(12, 10) == 12
    assert outputs(3, None) == 3
    with pytest.raises(ModelError, match=r"model\.num_classes=5 .* 10 classes: labels 5 to 9 do not fit"):
        outputs(5, 10)
    with pytest.raises(ModelError, match=r"model\.num_classes=9 .* 10 classes: label 9 does not fit"):
        outputs(9, 10)
    with pytest.raises(ModelError, match=r"mlp needs model\.num_classes"):
        outputs(None, None)


def test_build_model_leaves_the_config_alone() -> None:
    config = ModelConfig()
    build_model(config, num_classes=10, input_shape=(4,))
    assert config == ModelConfig()
