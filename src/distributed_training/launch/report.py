"""How a job ended, in the words that stay last on the screen."""

from __future__ import annotations

import json
import platform
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from distributed_training.runtime.watch import FAILED_ELSEWHERE, HUNG

_MEANINGS = {
    signal.SIGKILL: "usually the system, because memory ran out (`dmesg` shows it), or somebody's kill -9",
    signal.SIGTERM: "somebody or the scheduler asked it to end",
    signal.SIGSEGV: "a crash in native code; its Python lines are above",
    signal.SIGABRT: "a library gave up; what it said is above",
    signal.SIGBUS: "often a full /dev/shm: fewer data.num_workers, or more shared memory for the container",
}


@dataclass(frozen=True)
class Outcome:
    """Exit code of a job, and what to say about it."""

    code: int
    report: str = ""


def of_failures(
    failures: Mapping[int, ProcessFailure], world_size: int, where: Mapping[int, str] | None = None
) -> Outcome:
    """The rank whose failure came first. The others only ended because of it.

    `where` names machine and process of each rank; left out, they are of this machine.
    """
    rank, failure = min(failures.items(), key=lambda item: (_how_late(item[1]), item[1].timestamp, item[0]))
    code = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    place = where[rank] if where is not None else f"{platform.node()}, process {failure.pid}"
    return Outcome(code, _describe(f"rank {rank} of {world_size} ({place})", failure))


def of_signal(number: signal.Signals, given_up_after: float, errors: list[str]) -> Outcome:
    """The job was asked to stop. Where all went well, the ranks have said so."""
    late = f"{number.name}: some ranks had not ended {given_up_after:g} s later and were killed"
    return Outcome(128 + number, "\n".join([*errors, *([late] if given_up_after else [])]))


def of_error_files(files: Mapping[int, str], world_size: int) -> list[str]:
    """The errors that ranks left behind, for jobs whose exit codes are not known."""
    said = {rank: json.loads(Path(path).read_text()) for rank, path in files.items() if Path(path).is_file()}
    return [with_trace(f"rank {rank} of {world_size}", error["message"]) for rank, error in said.items()]


def _how_late(failure: ProcessFailure) -> int:
    """Smaller is nearer to the cause: an error, a crash, an exit code, standing still, being ended by others."""
    code = failure.exitcode
    if code in (HUNG, FAILED_ELSEWHERE):
        return 3 if code == HUNG else 5
    if code in (-signal.SIGTERM, 128 + signal.SIGTERM):
        return 4
    if _error_of(failure) is not None:
        return 0
    return 1 if code < 0 else 2


def _error_of(failure: ProcessFailure) -> dict[str, Any] | None:
    said = failure.error_file_data.get("message")
    return said if isinstance(said, dict) else None


def _describe(who: str, failure: ProcessFailure) -> str:
    code, error = failure.exitcode, _error_of(failure)
    if code == FAILED_ELSEWHERE:
        return f"{who} ended because a rank on another machine failed: that machine's screen says why"
    if code == HUNG:
        return f"{who} and the others stood still: their report is above"
    if error is not None:
        return with_trace(who, error)
    if code < 0:
        number = signal.Signals(-code)
        return f"{who} was killed by {number.name}: {_meaning(number)}"
    return f"{who} ended with exit code {code}; what it said is above"


def of_mpi_signal(who: str, number: int) -> Outcome:
    """A rank that mpirun saw end by a signal."""
    kind = signal.Signals(number)
    return Outcome(128 + number, f"{who} was killed by {kind.name}: {_meaning(kind)}")


def _meaning(number: signal.Signals) -> str:
    return _MEANINGS.get(number, "what it said is above")


def with_trace(who: str, error: dict[str, Any]) -> str:
    """An error as its rank left it: with the traceback, unless the message says it all."""
    facts = error["extraInfo"]
    return f"{'' if facts.get('expected') else facts['py_callstack']}{who} failed: {error['message']}"
