"""One tracker's fault must never become the run's."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.contract.tracker import Points, TrackerContract, run_info
from tests.tracking.test_jsonl import jsonl_points

from distributed_training.tracking import RunInfo, Tracker, Trackers
from distributed_training.tracking.jsonl import JsonlTracker


class Recorder(Tracker):
    """Remembers its calls and raises in the one named."""

    def __init__(self, raises: str = "", error: type[BaseException] = ValueError) -> None:
        self.raises, self.error, self.calls = raises, error, []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.raises:
            raise self.error(f"no\nspace for {name}")

    def start(self, run: RunInfo) -> None:
        self._call("start")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._call("log")

    def checkpoint(self, path: Path, step: int, metrics: Mapping[str, float]) -> None:
        self._call("checkpoint")

    def finish(self, status: str, summary: Mapping[str, float]) -> None:
        self._call("finish")


def a_run(trackers: Trackers, directory: Path) -> None:
    trackers.start(run_info(directory))
    trackers.log({"a": 1.0}, 1)
    trackers.checkpoint(directory, 1, {})
    trackers.log({"a": 1.0}, 2)
    trackers.finish("completed", {})


ALL = ["start", "log", "checkpoint", "log", "finish"]


class TestTrackers(TrackerContract):
    def make(self) -> Trackers:
        return Trackers([Recorder("log"), JsonlTracker()])

    def points(self, directory: Path) -> Points:
        return jsonl_points(directory)


@pytest.mark.parametrize(
    ("raises", "heard"),
    [
        ("start", ["start"]),
        ("log", ["start", "log", "finish"]),  # told of the end, so that it can let go of what it holds
        ("checkpoint", ["start", "log", "checkpoint", "finish"]),
        ("finish", ALL),
    ],
)
def test_a_fault_is_told_once_and_the_others_go_on(
    raises: str, heard: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, broken, last = Recorder(), Recorder(raises), Recorder()
    with caplog.at_level(logging.WARNING):
        a_run(Trackers([first, broken, last]), tmp_path)
    assert first.calls == last.calls == ALL
    assert broken.calls == heard
    (record,) = caplog.records
    assert record.getMessage() == (
        f"Recorder: ValueError: no space for {raises}; left out from now on; training goes on"
    )


def test_a_broken_tracker_that_cannot_finish_either_is_not_told_twice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Hopeless(Recorder):
        def _call(self, name: str) -> None:
            super()._call(name)
            if name == "finish":
                raise OSError

    a_run(Trackers([Hopeless("log")]), tmp_path)
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1


def test_an_interrupt_by_the_user_passes_through(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        a_run(Trackers([Recorder("log", KeyboardInterrupt)]), tmp_path)


def test_none_at_all_is_fine(tmp_path: Path) -> None:
    a_run(Trackers([]), tmp_path)
