"""A resumed GPU side is known again by its loaders; a fresh one is not."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from distributed_training.split.identity import identity_for


def test_the_same_identity_only_when_a_run_is_resumed(tmp_path: Path) -> None:
    first = identity_for(tmp_path, 29500, again=False)
    assert identity_for(tmp_path, 29500, again=True) == first
    assert identity_for(tmp_path, 29501, again=True).token != first.token
    assert identity_for(tmp_path, 29500, again=False).token != first.token


def test_nobody_else_can_read_it(tmp_path: Path) -> None:
    identity_for(tmp_path, 29500, again=False)
    folder = tmp_path / ".pairing"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()] == [0o600]


def test_a_damaged_one_is_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = identity_for(tmp_path, 29500, again=False)
    (tmp_path / ".pairing" / "29500.json").write_text('{"token": 3')
    assert identity_for(tmp_path, 29500, again=True).token != first.token
    assert "the pairing link will be a new one" in caplog.text
