"""`dtrain` as a function: the command line run in this process."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from distributed_training.cli.main import main


@dataclass
class Outcome:
    """What a command left on the screen, and its exit code."""

    code: int
    out: str
    err: str


@pytest.fixture
def dtrain(in_tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable]:
    """Run `dtrain` with these words."""
    logger = logging.getLogger("distributed_training")
    before = (list(logger.handlers), logger.level, logger.propagate)

    def run(*words: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["dtrain", *words])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = capsys.readouterr()
        code = stopped.value.code
        return Outcome(code if isinstance(code, int) else int(bool(code)), captured.out, captured.err)

    yield run
    logger.handlers[:], logger.level, logger.propagate = before
