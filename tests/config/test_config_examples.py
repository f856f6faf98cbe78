"""The example files at the root of the repository are complete and true."""

from __future__ import annotations

from pathlib import Path

from distributed_training.config import Config, load_config
from distributed_training.config.config import known_keys
from distributed_training.config.load import ENVIRONMENT_NAMES, read_dotenv, read_yaml

ROOT = Path(__file__).parents[2]


def test_config_example_is_the_defaults() -> None:
    assert load_config(ROOT / "config.yaml.example", environ={}) == Config()


def test_config_example_holds_every_setting() -> None:
    values = read_yaml(ROOT / "config.yaml.example")
    for key in known_keys():
        here = values
        for part in key.split("."):
            assert part in here, f"{key} is missing in config.yaml.example"
            here = here[part]


def test_env_example_parses_and_is_the_defaults() -> None:
    variables = read_dotenv(ROOT / ".env.example")
    assert set(variables) == set(ENVIRONMENT_NAMES)
    assert load_config(environ={}, dotenv=ROOT / ".env.example") == Config()
