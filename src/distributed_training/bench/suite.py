"""Runs parts one after the other: what cannot run here is named with its reason, what is done is never lost."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from types import FrameType

from distributed_training.bench import facts
from distributed_training.bench.figures import BenchReport, PartResult
from distributed_training.bench.measure import ENOUGH
from distributed_training.bench.options import BenchOptions, spoken
from distributed_training.bench.output import Output
from distributed_training.bench.parts import Part
from distributed_training.runtime.errors import (
    BenchError,
    DistributedTrainingError,
    MissingDependencyError,
)
from distributed_training.runtime.signals import handled_by, interrupting

logger = logging.getLogger(__name__)
FAILED = "failed"
"""How the problem of a part begins that broke, and did not merely find that it cannot run here."""


def run_parts(
    parts: Sequence[Part], options: BenchOptions, output: Output | None = None, command: str = ""
) -> BenchReport:
    """Measure; the report is written after every part. Ctrl-C and SIGTERM end it with what is done by then."""
    if output is not None:
        output.check()
    report = BenchReport(
        machine=facts.machine(options.device),
        versions=facts.versions(),
        created=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        command=command,
    )
    began = time.monotonic()
    with interrupting(signal.SIGTERM):
        for number, part in enumerate(parts):
            head = f"[{number + 1}/{len(parts)}] {part.name}"
            options.say(f"{head}: {part.measures}")
            try:
                result = _run(part, _named(options, head), alone=len(parts) == 1)
                result.command = result.command or command.replace("bench all", f"bench {part.name}", 1)
                report.parts.append(result)
                report.interrupted = bool(options.cut)
            except KeyboardInterrupt:
                report.interrupted = True
            with _signals(_ignore, signal.SIGINT, signal.SIGTERM):  # a second one must not leave half a report
                if output is not None and report.parts:
                    output.write(report)
            if report.interrupted:
                break
            _tell_time(options.say, began, number + 1, len(parts))
    return report


def _run(part: Part, options: BenchOptions, alone: bool) -> PartResult:
    began = time.monotonic()
    try:
        result = part.load()(options)
        problem = ""
    except (BenchError, MissingDependencyError) as error:
        if alone:
            raise
        result, problem = _empty(part), str(error)
    except Exception as error:
        if alone:
            raise
        if not isinstance(error, DistributedTrainingError):
            logger.exception("%s failed", part.name)
        result, problem = _empty(part), f"{FAILED}: {type(error).__name__}: {error}"
    if problem:
        options.say(f"not measured: {problem}")
    result.problem = result.problem or problem or "; ".join(options.cut)
    result.seconds = time.monotonic() - began
    if result.figures and options.rounds < ENOUGH:
        result.notes.append(f"Too few rounds to conclude anything ({options.rounds}): raise --rounds.")
    return result


def _empty(part: Part) -> PartResult:
    return PartResult(name=part.name, title=part.name.capitalize(), about=f"{part.measures}.")


def _named(options: BenchOptions, head: str) -> BenchOptions:
    """The same options; progress begins with the name of the part."""
    say = options.say
    return dataclasses.replace(options, say=lambda line: say(f"{head}: {line}"))


def _tell_time(say: Callable[[str], None], began: float, done: int, of: int) -> None:
    taken = time.monotonic() - began
    if done < of:
        say(f"{done} of {of} parts done in {spoken(taken)}, about {spoken(taken / done * (of - done))} left")


@contextlib.contextmanager
def _signals(handler: Callable[[int, FrameType | None], None], *numbers: signal.Signals) -> Iterator[None]:
    """Signals handled so, where this thread may choose."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with handled_by(handler, numbers):
        yield


def _ignore(number: int, frame: FrameType | None) -> None:
    """Nothing: what is being done will be done in a moment."""
