"""Variants in processes or jobs of their own: turns, errors with their reason, deadlines, nothing left behind."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

from distributed_training.bench.options import BenchOptions
from distributed_training.bench.rotation import Forks, Rotation
from distributed_training.bench.turn_process import Start, TurnProcess
from distributed_training.runtime.errors import BenchError

HERE = "tests.bench.turn_targets"
start = functools.partial(TurnProcess, timeout=60.0)


def test_a_process_keeps_its_state_from_turn_to_turn_and_its_folder_goes_with_it() -> None:
    with start("counter", Start(f"{HERE}:counting", {"start": 10})) as process:
        folder = Path(process.ready()["folder"])
        assert (folder / "own").is_file()
        assert process.turn(more=1) == {"total": 11}
        assert process.turn(more=5) == {"total": 16}
    assert not folder.exists()


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("refusing", "one: this cannot be done here"),
        ("dying", "ended with code 3 and without an answer.*\n.*the disk is full"),
    ],
)
def test_what_goes_wrong_is_said(target: str, says: str) -> None:
    with start("one", Start(f"{HERE}:{target}", {})) as process, pytest.raises(BenchError, match=says):
        process.ready()


def test_a_process_that_hangs_is_ended_at_the_deadline() -> None:
    says = r"slow: its process gave no answer within 1 s \(raise --timeout\)"
    with TurnProcess("slow", Start(f"{HERE}:hanging", {}), 1.0) as process, pytest.raises(BenchError, match=says):
        process.ready()


def test_a_job_of_ranks_answers_with_the_largest_of_each_value() -> None:
    with start("job", Start(f"{HERE}:ranks", {}, ranks=2, launcher="dtrain")) as process:
        assert process.ready() == {"rank": 1}
        found = process.turn(factor=3)
        assert (found["found"], found["free_bytes"]) == (3, 0)
        assert process.turn(factor=-3)["found"] == 0
    assert not Path(found["folder"]).exists()


def test_a_rank_that_cannot_be_set_up_ends_its_job_with_the_reason() -> None:
    broken = Start(f"{HERE}:ranks", {"bad": 1}, ranks=2, launcher="dtrain")
    missing = Start("tests.bench.nothing:run", {}, ranks=2, launcher="dtrain")
    dying = Start(f"{HERE}:dying", {}, ranks=2, launcher="dtrain")
    with Rotation(BenchOptions(rounds=1, timeout=60.0)) as rotation:
        rotation.set_up({"broken": broken, "missing": missing, "dying": dying})
        assert rotation.measure() == {}
    assert rotation.failed["broken"] == "rank 1 cannot do this"
    assert rotation.failed["missing"] == "ModuleNotFoundError: No module named 'tests.bench.nothing'"
    assert rotation.failed["dying"].startswith("its job of 2 ranks ended with code 3 and without an answer; its last")


def test_ctrl_c_ends_all_processes_also_the_one_that_works() -> None:
    starts = {"idle": Start(f"{HERE}:large", {"name": "idle"}), "busy": Start(f"{HERE}:interrupting", {})}
    with Rotation(BenchOptions(rounds=1, warmup=0, timeout=60.0)) as rotation:
        rotation.set_up(starts)
        with pytest.raises(KeyboardInterrupt):
            rotation.measure()
    for facts in rotation.facts.values():
        with pytest.raises(ProcessLookupError):
            os.kill(facts["pid"], 0)


def test_variants_that_cannot_be_set_up_are_named_and_the_others_measured() -> None:
    starts = {"bad": Start(f"{HERE}:refusing", {}), "good": Start(f"{HERE}:counting", {"start": 0})}
    with Rotation(BenchOptions(rounds=2, warmup=1, timeout=60.0), "case") as rotation:
        rotation.set_up(starts)
        answers = rotation.measure({"good": {"more": 2}})
    assert answers == {"good": [{"total": 4}, {"total": 6}]}
    assert rotation.failed == {"bad": "this cannot be done here"}


def test_who_leaves_no_room_in_memory_is_set_up_anew_for_each_turn() -> None:
    starts = {name: Start(f"{HERE}:large", {"name": name}) for name in "ab"}
    with Rotation(BenchOptions(rounds=2, warmup=0, timeout=60.0), "case") as rotation:
        rotation.set_up(starts)
        answers = rotation.measure()
    assert len({answer["pid"] for found in answers.values() for answer in found}) == 4
    assert rotation.notes == ["Memory was short, so that every turn of these started anew: a, b."]


def test_forked_turns_leave_nothing_behind_and_tell_their_errors() -> None:
    options = BenchOptions(rounds=2, warmup=0, timeout=60.0)
    with Forks(f"{HERE}:forked", options) as forks:
        forks.ready()
        found = forks.measure({"three": {"number": 3}, "four": {"number": 4}}, "squares")
        assert {name: [answer["square"] for answer in answers] for name, answers in found.items()} == {
            "three": [9, 9],
            "four": [16, 16],
        }
        assert len({answer["pid"] for answers in found.values() for answer in answers}) == 4
        with pytest.raises(BenchError, match="below zero"):
            forks.measure({"less": {"number": -1}}, "squares")
