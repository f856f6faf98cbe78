"""The sections: the keys users know, their defaults, ranges and documentation."""

from __future__ import annotations

import pytest

from distributed_training.config import Config, ConfigError, DataConfig, ModelConfig, TrainingConfig, load_config
from distributed_training.config.config import known_keys
from distributed_training.config.explain import meanings

EXPECTED = {
    "model": ["name", "num_classes", "pretrained"],
    "training": [
        "epochs",
        "batch_size",
        "lr",
        "momentum",
        "weight_decay",
        "warmup_epochs",
        "gradient_clip",
        "seed",
        "precision",
        "gradient_accumulation",
        "gradient_checkpointing",
        "compile",
    ],
    "data": ["root", "dataset", "num_workers", "pin_memory"],
    "network": ["gpu_host", "cpu_host", "port"],
    "strategy": ["name"],
    "checkpoint": ["every_epochs", "keep", "resume"],
    "early_stopping": ["enabled", "patience", "monitor"],
    "tracking": ["trackers", "project"],
}

# One value that differs from the default for every setting.
OTHER_VALUES = {
    "model.name": "resnet18",
    "model.num_classes": 7,
    "model.pretrained": True,
    "training.epochs": 3,
    "training.batch_size": 128,
    "training.lr": 0.1,
    "training.momentum": 0.5,
    "training.weight_decay": 1e-4,
    "training.warmup_epochs": 0.5,
    "training.gradient_clip": 1.0,
    "training.seed": 42,
    "training.precision": "bf16",
    "training.gradient_accumulation": 4,
    "training.gradient_checkpointing": True,
    "training.compile": "on",
    "data.root": "/data",
    "data.dataset": "cifar10",
    "data.num_workers": 2,
    "data.pin_memory": True,
    "network.gpu_host": "10.0.0.1",
    "network.cpu_host": "10.0.0.2",
    "network.port": 29501,
    "strategy.name": "single",
    "checkpoint.every_steps": 100,
    "early_stopping.enabled": True,
    "tracking.trackers": ["wandb"],
}


@pytest.mark.parametrize("key", [f"{section}.{name}" for section, names in EXPECTED.items() for name in names])
def test_key_exists(key: str) -> None:
    assert key in known_keys()


@pytest.mark.parametrize(("key", "value"), OTHER_VALUES.items())
def test_value_is_taken_over_and_survives_the_environment_as_text(key: str, value: object) -> None:
    assert Config().get(key) != value
    assert Config().replace(**{key: value}).get(key) == value
    variable = "DTRAIN_" + key.upper().replace(".", "__")
    assert load_config(environ={variable: str(value)}).get(key) == value


def test_every_setting_has_a_docstring() -> None:
    assert set(meanings()) == set(known_keys())
    assert all(doc.strip() and "\n" not in doc for doc in meanings().values())


def test_port_defaults_to_29500() -> None:
    assert Config().network.port == 29500


@pytest.mark.parametrize(
    ("section", "values", "key"),
    [
        (ModelConfig, {"num_classes": 0}, "model.num_classes=0"),
        (TrainingConfig, {"epochs": 0}, "training.epochs=0"),
        (TrainingConfig, {"batch_size": 0}, "training.batch_size=0"),
        (TrainingConfig, {"lr": 0}, "training.lr=0"),
        (TrainingConfig, {"lr": float("nan")}, "training.lr=nan"),
        (TrainingConfig, {"momentum": 1.5}, "training.momentum=1.5"),
        (TrainingConfig, {"weight_decay": -1}, "training.weight_decay=-1"),
        (TrainingConfig, {"epochs": 2, "warmup_epochs": 3}, "training.warmup_epochs=3"),
        (TrainingConfig, {"gradient_clip": 0}, "training.gradient_clip=0"),
        (TrainingConfig, {"batch_size": 2, "gradient_accumulation": 3}, "training.gradient_accumulation=3"),
        (TrainingConfig, {"seed": -1}, "training.seed=-1"),
        (TrainingConfig, {"precision": "fp61"}, "training.precision='fp61'"),
        (DataConfig, {"num_workers": -1}, "data.num_workers=-1"),
        (DataConfig, {"augment": {"std": [0.0]}}, "data.augment.std=0.0"),
        (DataConfig, {"validation_fraction": 1.0}, "data.validation_fraction=1.0"),
    ],
)
def test_impossible_value_is_refused_by_name(section: type, values: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        section(**values)
    assert str(caught.value).startswith(key)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("port", [0, 65536])
def test_port_range(port: int) -> None:
    with pytest.raises(ConfigError, match=r"network\.port"):
        Config.from_dict({"network": {"port": port}})


def test_word_off_is_not_a_boolean_where_words_are_meant() -> None:
    assert TrainingConfig(nonfinite=False).nonfinite == "off"  # type: ignore[arg-type]
