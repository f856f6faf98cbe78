"""Processes that take turns: each at work in its own, asleep in the others'."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distributed_training.planning.turns import Giver, Taker
from distributed_training.runtime.errors import BenchError

TAKER = """
import sys
from pathlib import Path
from distributed_training.planning.turns import Taker
taker = Taker(Path(sys.argv[1]), sys.argv[2], 60.0)
turns = 0
while taker.wait():
    turns += 1
    if turns == 3:
        raise SystemExit("three are too many")
    taker.done({"turn": turns, "name": sys.argv[2]})
print("ended")
"""


def started(folder: Path, giver: Giver, names: tuple[str, ...]) -> None:
    for name in names:
        giver.start("none", 1, ["-c", TAKER, str(folder), name], {}, folder / name)


def test_every_process_answers_in_every_turn_and_ends_when_there_is_no_more(tmp_path: Path) -> None:
    with Giver(tmp_path, ("a", "b"), 60.0) as giver:
        started(tmp_path, giver, ("a", "b"))
        turns = [giver.turn() for _ in range(2)]
        left = giver._processes

    assert turns == [[{"turn": n, "name": name} for name in ("a", "b")] for n in (1, 2)]
    assert [process.returncode for process, _ in left] == [0, 0]
    assert "ended" in (tmp_path / "a" / "output.txt").read_text()


def test_a_process_that_ends_in_its_turn_is_told_by_its_last_words(tmp_path: Path) -> None:
    with Giver(tmp_path, ("a",), 60.0) as giver:
        started(tmp_path, giver, ("a",))
        giver.turn()
        giver.turn()
        with pytest.raises(BenchError, match="exit code 1: three are too many"):
            giver.turn()


def test_no_wait_is_without_a_deadline(tmp_path: Path) -> None:
    giver = Giver(tmp_path, ("nobody",), 0.05)
    (tmp_path / "own").mkdir()
    with giver:
        giver.start("none", 1, ["-c", "import time; time.sleep(60)"], {}, tmp_path / "own")
        with pytest.raises(BenchError, match=r"not done after 0\.05 s"):
            giver.turn()
        giver._processes[0][0].kill()  # it would be waited for
    with pytest.raises(BenchError, match=r"no turn within 0\.05 s"):
        Taker(tmp_path / "elsewhere", "a", 0.05).wait()


def test_a_process_whose_parent_is_gone_ends(tmp_path: Path) -> None:
    taker = Taker(tmp_path, "a", 60.0)
    taker._parent = os.getppid() + 1

    assert not taker.wait()
