"""Every command on the pages exists with the options and settings that it is given, whoever's program it is."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.compose import ROOT, services, stages
from tests.pages import Command, dtrain_commands, shell_lines

from distributed_training.cli.main import app
from distributed_training.config.load import load_config

WRONG = {"training.epoch=3", "DTRAIN_TRAINING__EPOCHS=many"}
"""Settings that show an error on purpose."""
LAUNCHERS = {"torchrun", "accelerate", "horovodrun", "mpirun"}
PROGRAMS = {"tensorboard", "wandb", "ray"} | LAUNCHERS
"""Other people's programs that the extras install."""
ELSEWHERE = {"aws", "sbatch", "pip", "echo"}
"""Programs of the system, of a cloud or of a cluster."""


def words_of(command: Command) -> str:
    return str(command)


@pytest.mark.parametrize("command", dtrain_commands(), ids=words_of)
def test_ours_exists_and_its_settings_are_known(command: Command) -> None:
    found: Any = typer.main.get_command(app)
    words = list(command.words)
    while words and words[0] in getattr(found, "commands", {}):
        found, words = found.commands[words[0]], words[1:]
    assert not getattr(found, "commands", {}), f"no such command: {words}"
    options = {name for parameter in found.params for name in parameter.opts + parameter.secondary_opts}
    given = {word.partition("=")[0] for word in words if word.startswith("-")}
    assert given <= options

    values = {words[i + 1] for i, word in enumerate(words[:-1]) if word in ("--secret", "--env", "--sbatch")}
    settings = [w for w in words if "=" in w and "://" not in w and not w.startswith("-") and w not in values | WRONG]
    load_config(None, settings, environ={}, dotenv="no .env")
    variables = [v for v in command.variables if v.startswith("DTRAIN_") and v not in WRONG]
    load_config(None, [], environ=dict(v.split("=", 1) for v in variables), dotenv="no .env")


def others() -> list[Command]:
    return [command for command in shell_lines() if command.words[0] != "dtrain"]


@pytest.mark.parametrize("command", others(), ids=words_of)
def test_what_others_are_asked_to_do_is_there(command: Command) -> None:
    program, *words = command.words
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(words) <= set(targets)
    elif program == "docker":
        _check_docker(words)
    elif program in ("python", "python3") and words[0].endswith(".py"):
        source = (ROOT / words[0]).read_text()
        assert [word for word in words[1:] if word.startswith("--") and f'"{word}"' not in source] == []
    elif program in PROGRAMS:
        assert shutil.which(program, path=str(Path(sys.executable).parent)), f"{program} is not installed"
    else:
        assert program in ELSEWHERE


def _check_docker(words: list[str]) -> None:
    """Services, profiles and images are ours."""
    files = [words[i + 1] for i, word in enumerate(words) if word == "-f"]
    assert all((ROOT / name).is_file() for name in files)
    if words[0] == "compose":
        profiles = {profile for service in services().values() for profile in service["profiles"]}
        assert {words[i + 1] for i, word in enumerate(words) if word == "--profile"} <= profiles
        scaled = {words[i + 1].partition("=")[0] for i, word in enumerate(words) if word == "--scale"}
        named = {word for word in words if word in services()}
        assert scaled <= services().keys()
        assert named or "--profile" in words
    else:
        targets = [words[i + 1] for i, word in enumerate(words) if word == "--target"]
        images = [word.partition(":")[2] for word in words if word.startswith("distributed-training:")]
        assert targets + images
        assert set(targets + images) <= stages().keys()


def test_there_are_commands() -> None:
    assert len(dtrain_commands()) >= 60
    assert len(others()) >= 20
