"""Every test of the config runs in an empty folder with no setting in the environment."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from distributed_training.config.load import ENVIRONMENT_NAMES, PREFIX


@pytest.fixture(autouse=True)
def _bare_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name in ENVIRONMENT_NAMES or name.startswith(PREFIX):
            monkeypatch.delenv(name)


@pytest.fixture
def write() -> Callable[..., str]:
    """Write a file into the working directory and give its name back."""

    def write(text: str, name: str = "config.yaml") -> str:
        Path(name).write_text(text, encoding="utf-8")
        return name

    return write
