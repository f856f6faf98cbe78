"""The two files that a search leaves, and who is ahead by them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from tests.tuning.searches import make_search

from distributed_training.runtime.errors import RunDirectoryError
from distributed_training.tuning.records import Search, SearchFolder, Trial
from distributed_training.tuning.standings import best_so_far, best_trial, count, pareto_front, ranked, within_reach


def trial(name: str, status: str = "completed", **metrics: float) -> Trial:
    return Trial(name, status=status, last=dict(metrics), best=dict(metrics))  # type: ignore[arg-type]


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    place = SearchFolder(tmp_path / "new")
    search = Search(name="new", objectives={"val_loss": "min"}, space={"training.lr": {"uniform": [0, 1]}}, seed=3)
    place.save(search)
    odd = Trial("a", {"training.lr": np.float64(0.5), "n": np.int64(3), "path": tmp_path}, history=[(1, math.nan)])
    odd.last = {"val_loss": math.inf}
    place.append(odd)
    assert place.load() == search
    (read,) = place.trials()
    assert read.parameters == {"training.lr": 0.5, "n": 3, "path": str(tmp_path)}
    assert read.value("val_loss") is None  # not finite: nothing to compare
    assert math.isnan(read.history[0][1])
    json.loads(place.trials_file.read_text(), parse_constant=lambda word: pytest.fail(f"not JSON: {word}"))


def test_the_last_line_of_a_trial_counts_and_half_a_line_does_not(tmp_path: Path) -> None:
    place = SearchFolder(tmp_path)
    place.append(Trial("a", status="running"), Trial("b", status="running"))
    place.append(trial("a", val_loss=0.5))
    with place.trials_file.open("a") as file:
        file.write('{"id": "b", "status": "comp')  # killed here
    assert {t.id: t.status for t in place.trials()} == {"a": "completed", "b": "running"}
    place.append(trial("b", val_loss=0.25))  # the search goes on
    assert {t.id: t.status for t in place.trials()} == {"a": "completed", "b": "completed"}
    place.write_trials(place.trials())
    assert len(place.trials_file.read_text().splitlines()) == 2


def test_a_folder_of_something_else_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="not the folder of a search"):
        SearchFolder(tmp_path).load()
    SearchFolder(tmp_path).search_file.write_text("[]")
    with pytest.raises(RunDirectoryError, match="not written by dtrain tune"):
        SearchFolder(tmp_path).load()


def test_the_best_is_among_those_that_did_not_fail() -> None:
    search = Search(name="s", objectives={"val_loss": "min"})
    trials = [
        trial("1", val_loss=0.4), trial("2", "failed", val_loss=0.1), trial("3", "stopped", val_loss=0.3),
        trial("4", "running"), trial("5", val_loss=0.3), trial("6", val_loss=math.nan),
    ]  # fmt: skip
    assert [t.id for t in ranked(search, trials)] == ["3", "5", "1"]
    assert best_so_far(search, trials) == [(1, 0.4), (3, 0.3)]
    assert count(trials) == {"running": 1, "completed": 3, "stopped": 1, "failed": 1}
    assert best_trial(Search(name="s", objectives={"val_loss": "max"}), trials) is trials[0]
    assert best_trial(search, []) is None


def test_the_front_holds_what_nothing_beats() -> None:
    search = Search(name="s", objectives={"acc": "max", "seconds": "min"})
    trials = [
        trial("slow", acc=0.9, seconds=9), trial("fast", acc=0.5, seconds=1), trial("worse", acc=0.5, seconds=2),
        trial("middle", acc=0.7, seconds=3), trial("twin", acc=0.7, seconds=3), trial("half", acc=0.99),
    ]  # fmt: skip
    assert [t.id for t in pareto_front(search, trials)] == ["slow", "middle", "twin", "fast"]


def test_searches_made_by_hand_are_as_they_say(tmp_path: Path) -> None:
    place = make_search(tmp_path / "s")
    assert count(place.trials())["failed"] == 1
    assert len(place.trials()) == 30


def test_what_is_far_off_is_brought_near_and_nothing_else_is() -> None:
    assert within_reach([0.1, 0.2, 0.3, 0.9], "min") == [0.1, 0.2, 0.3, 0.9]
    *near, far = within_reach([0.1, 0.2, 0.3, 0.2, 1e9], "min")
    assert near == [0.1, 0.2, 0.3, 0.2]
    assert far == pytest.approx(0.34)
    assert within_reach([5.0, 4.0, 4.5, 4.2, -1e6], "max")[-1] == pytest.approx(3.8)
    assert within_reach([1.0, 1.0, 1.0, 1.0, 7.0], "min") == [1.0, 1.0, 1.0, 1.0, 7.0]
