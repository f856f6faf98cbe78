"""The ledger tells which samples each step used."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from distributed_training.training import ledger as module
from distributed_training.training.ledger import Ledger, hash_of


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_a_step_with_the_hash_of_its_samples(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ids = np.array([5, 1, 3])
    with Ledger(path) as ledger:
        ledger.record(2, 7, ids)
    assert lines(path) == [{"epoch": 2, "step": 7, "samples": 3, "ids": hash_of(ids)}]


def test_the_hash_depends_on_ids_and_order_and_not_on_their_type() -> None:
    assert hash_of(np.array([1, 2])) != hash_of(np.array([2, 1]))
    assert hash_of(np.array([1, 2])) != hash_of(np.array([1, 3]))
    assert hash_of(np.array([1, 2], dtype=np.int32)) == hash_of(np.array([1, 2], dtype=np.int64))
    assert hash_of(np.array([1, 9, 2])[::2]) == hash_of(np.array([1, 2]))


def test_ids_may_change_once_they_are_recorded_and_flushed(tmp_path: Path) -> None:
    ids = np.array([1, 2])
    expected = hash_of(ids)
    with Ledger(tmp_path / "l") as ledger:
        ledger.record(0, 0, ids)
        ledger.flush()
        ids[:] = 0
    assert lines(tmp_path / "l")[0]["ids"] == expected


def test_a_resume_is_marked_in_its_place(tmp_path: Path) -> None:
    path, ids = tmp_path / "l", np.array([1])
    with Ledger(path) as ledger:
        ledger.record(0, 0, ids)
        ledger.record(0, 1, ids)
    with Ledger(path) as ledger:
        ledger.resumed(0, 1)
        ledger.record(0, 1, ids)
    found = lines(path)
    assert [line.get("step") for line in found] == [0, 1, None, 1]
    assert found[2] == {"resume": {"epoch": 0, "step": 1}}


def test_lines_reach_the_file_at_a_flush(tmp_path: Path) -> None:
    path = tmp_path / "l"
    with Ledger(path) as ledger:
        ledger.record(0, 0, np.array([1]))
        assert path.read_text() == ""
        ledger.flush()
        assert len(lines(path)) == 1
        ledger.flush()
        assert len(lines(path)) == 1


def test_lines_reach_the_file_by_themselves_after_a_while(tmp_path: Path) -> None:
    path = tmp_path / "l"
    with Ledger(path) as ledger:
        for step in range(module._FLUSH_EVERY):
            ledger.record(0, step, np.array([step]))
        assert len(lines(path)) == module._FLUSH_EVERY


def test_an_error_still_leaves_all_lines(tmp_path: Path) -> None:
    def fail() -> None:
        with Ledger(tmp_path / "l") as ledger:
            ledger.record(0, 0, np.array([1]))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert len(lines(tmp_path / "l")) == 1


def test_without_a_file_nothing_is_kept() -> None:
    with Ledger(None) as ledger:
        ledger.resumed(0, 0)
        for step in range(2 * module._FLUSH_EVERY + 1):
            ledger.record(0, step, np.array([1]))
        ledger.flush()
