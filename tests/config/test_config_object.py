"""`Config` in a program: get, replace, save, round trips."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from distributed_training.config import Config, ConfigError, ModelConfig, Origin, get_config


def test_get_dotted_keys_sections_and_defaults() -> None:
    config = Config.from_dict({"model": {"args": {"hidden": [8]}}, "data": {"augment": {"crop": 4}}})
    assert config.get("training.batch_size") == 64
    assert config.get("training.learning_rate") == config.training.lr
    assert config.get("model.args.hidden") == [8]
    assert config.get("data.augment.crop") == 4
    assert config.get("network") == {"gpu_host": "127.0.0.1", "cpu_host": "127.0.0.1", "port": 29500, "token_file": ""}
    assert config.get("training.nope") is None
    assert config.get("training.nope", 3) == 3


def test_get_network_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_HOST", "gpu.lab")
    network = get_config().get_network_config()
    assert network == {"gpu_host": "gpu.lab", "cpu_host": "127.0.0.1", "port": 29500, "token_file": ""}


def test_dict_round_trip() -> None:
    config = Config.from_dict({"training": {"lr": 0.1}, "tracking": {"tags": ["a"]}})
    assert Config.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("name", ["plain", "ünïcode", "a${b}", "007", "true", "null-ish: #", "12e5"])
def test_file_round_trip(tmp_path: Path, name: str) -> None:
    config = Config.from_dict(
        {
            "run": {"name": name.replace("${", "\\${")},
            "model": {"args": {"hidden": [8, 8], "deep": {"x": None}}},
            "data": {"augment": {"mean": [0.5], "std": [0.25]}},
            "training": {"gradient_clip": 1.0, "lr": 1e-5},
        }
    )
    assert config.run.name == name
    config.save(tmp_path / "saved.yaml")
    assert Config.from_file(tmp_path / "saved.yaml") == config
    assert config.replace(**{"training.epochs": 3}).run.name == name


def test_replace_changes_only_what_is_named() -> None:
    config = Config.from_dict({"training": {"lr": 0.1}}, source="somewhere")
    changed = config.replace(**{"training.epochs": 3, "training.learning_rate": 0.2, "strategy": "single"})
    assert (changed.training.epochs, changed.training.lr, changed.strategy.name) == (3, 0.2, "single")
    assert (config.training.epochs, config.training.lr, config.strategy.name) == (30, 0.1, "auto")
    assert changed.replace(**{"training.epochs": 30, "training.lr": 0.1, "strategy": "auto"}) == config


def test_replace_keeps_provenance() -> None:
    config = Config.from_dict({"training": {"lr": 0.1}}, source="somewhere").replace(**{"training.epochs": 3})
    assert [o.source for o in config.origins("training.lr")] == ["default", "somewhere"]
    assert config.origins("training.epochs") == [Origin("default", 30), Origin("replace", 3)]
    assert [o.source for o in config.origins("training.seed")] == ["default"]


def test_replace_puts_a_new_mapping_in_place_of_the_old() -> None:
    config = Config.from_dict({"model": {"args": {"hidden": [8]}}})
    assert config.replace(**{"model.args": {"latent": 4}}).model.args == {"latent": 4}
    assert config.replace(**{"model.args.dropout": 0.5}).model.args == {"hidden": [8], "dropout": 0.5}


def test_replace_refuses_unknown_and_impossible() -> None:
    with pytest.raises(ConfigError, match=r"^replace: unknown setting training.epocs; did you mean training.epochs\?"):
        Config().replace(**{"training.epocs": 3})
    with pytest.raises(ConfigError, match=r"^replace: training.epochs=0"):
        Config().replace(**{"training.epochs": 0})


def test_sections_must_be_sections() -> None:
    with pytest.raises(ConfigError, match=r"^model=.* must be ModelConfig, not dict"):
        Config(model={"name": "mlp"})  # type: ignore[arg-type]
    assert Config(model=ModelConfig(name="vae")).origins("model.name") == [Origin("default", "vae")]


def test_unsupported_object_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^dict: training.lr: .*object") as caught:
        Config.from_dict({"training": {"lr": object()}})
    assert "\n" not in str(caught.value)


def test_importing_the_config_does_not_import_torch() -> None:
    code = (
        "import sys, distributed_training.config.explain as e; e.explain(e.Config()); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
