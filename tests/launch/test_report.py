"""Which of several dead ranks is named as the cause, and in which words."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from distributed_training.launch import report


def failure(code: int, error: Path | None = None) -> ProcessFailure:
    return ProcessFailure(local_rank=0, pid=12, exitcode=code, error_file=str(error or "none"))


def error_file(path: Path, message: str, expected: bool) -> Path:
    facts = {"py_callstack": "Traceback (most recent call last):\n", "timestamp": "1", "expected": expected}
    path.write_text(json.dumps({"message": {"message": message, "extraInfo": facts}}))
    return path


def test_an_error_counts_before_a_crash_and_both_before_those_that_were_ended(tmp_path: Path) -> None:
    raised = failure(1, error_file(tmp_path / "error", "ValueError: x", expected=False))
    ended = {0: failure(-signal.SIGTERM), 1: failure(76), 2: failure(75), 3: failure(9), 4: failure(-signal.SIGKILL)}

    outcome = report.of_failures({**ended, 5: raised}, 6)
    assert (outcome.code, outcome.report.splitlines()[0]) == (1, "Traceback (most recent call last):")
    assert outcome.report.splitlines()[-1].startswith("rank 5 of 6 (")
    assert report.of_failures(ended, 6).code == 128 + signal.SIGKILL
    del ended[4]
    assert "rank 3 of 6" in report.of_failures(ended, 6).report
    del ended[3]
    assert "stood still" in report.of_failures(ended, 6).report
    del ended[2]
    assert "SIGTERM" in report.of_failures(ended, 6).report
    assert "on another machine" in report.of_failures({1: failure(76)}, 6).report


def test_a_users_mistake_has_no_traceback(tmp_path: Path) -> None:
    mistake = failure(2, error_file(tmp_path / "error", "unknown setting", expected=True))

    outcome = report.of_failures({0: mistake}, 1)

    assert outcome.code == 2
    assert outcome.report.endswith("failed: unknown setting")
    assert "Traceback" not in outcome.report


@pytest.mark.parametrize("given_up", [0, 60])
def test_an_interrupted_job_is_silent_unless_something_went_wrong(tmp_path: Path, given_up: float) -> None:
    said = report.of_error_files({1: str(error_file(tmp_path / "1", "disk full", expected=True)), 0: "nothing"}, 2)
    assert said == ["rank 1 of 2 failed: disk full"]

    outcome = report.of_signal(signal.SIGINT, given_up, said if given_up else [])

    assert outcome.code == 130
    assert outcome.report.splitlines() == ([*said, outcome.report.splitlines()[-1]] if given_up else [])
    assert ("60 s later and were killed" in outcome.report) == bool(given_up)
