"""What a process says before it ends because of an error. With other ranks: tests/integration/test_failures.py."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

import pytest

from distributed_training.runtime import failure
from distributed_training.runtime.errors import DataError


@pytest.fixture
def as_rank_1(monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    return f"rank 1 of 2 ({platform.node()}, process {os.getpid()}) failed: "


def raised(error: Exception, cause: Exception | None = None) -> Exception:
    try:
        raise error from cause
    except Exception as found:
        return found


def test_alone_an_error_of_ours_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    failure.report(raised(DataError("sample 3 is bad"), KeyError(3)))
    assert capsys.readouterr().err == "error: sample 3 is bad\n"


def test_a_rank_ends_with_its_number(as_rank_1: str, capsys: pytest.CaptureFixture[str]) -> None:
    failure.report(raised(DataError("sample 3 is bad")))
    assert capsys.readouterr().err == f"{as_rank_1}sample 3 is bad\n"


@pytest.mark.parametrize(
    ("error", "last"),
    [
        (raised(ValueError("mine")), "ValueError: mine"),
        (raised(DataError("sample 3: mine"), raised(ValueError("mine"))), "sample 3: mine"),
    ],
    ids=["the user's", "ours, because of the user's"],
)
def test_the_users_own_error_comes_with_its_traceback(
    as_rank_1: str, capsys: pytest.CaptureFixture[str], error: Exception, last: str
) -> None:
    failure.report(error)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-2:] == ["ValueError: mine", f"{as_rank_1}{last}"]


def test_an_environment_that_makes_no_sense_is_no_second_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "5")
    failure.report(raised(DataError("sample 3 is bad")))
    assert capsys.readouterr().err == "error: sample 3 is bad\n"


@pytest.mark.parametrize("shown", [False, True])
def test_a_launcher_finds_the_error_in_a_file(
    as_rank_1: str,
    shown: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    if shown:
        monkeypatch.setenv(failure.SHOWN_BY_LAUNCHER, "1")
    failure.report(raised(ValueError("mine")))
    said = json.loads((tmp_path / "error.json").read_text())["message"]
    assert said["message"] == "ValueError: mine"
    assert "Traceback" in said["extraInfo"]["py_callstack"]
    assert capsys.readouterr().err.endswith("ValueError: mine\n") is not shown
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]
