"""The same training under one strategy after another, each compared with one process on one device."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from distributed_training.runtime.errors import DistributedTrainingError, RunDirectoryError
from distributed_training.strategies import STRATEGIES, needs
from distributed_training.verify.compare import (
    SENSITIVE,
    Curve,
    Deviation,
    Record,
    first_other_batch,
    measure,
    read_record,
    rounding,
)
from distributed_training.verify.report import ABSENT, FAIL, LOSSY, PASS, YARDSTICK, Report, Row
from distributed_training.verify.running import Outcome, run_program
from distributed_training.verify.subject import Subject, Variant, read_variant

REFERENCE = "single"
_NUDGE = 1e-2  # far above a change in the last bit, bf16 included, and far below other weights


@dataclass(frozen=True)
class Settings:
    """How to verify."""

    nproc: int = 2
    """Ranks of the strategies that have several."""
    steps: int = 20
    """Optimizer steps to compare."""
    tolerance: float = 1e-6
    """Largest relative difference that needs no explanation by rounding."""
    folder: Path | None = None
    """Where records and outputs go and stay; left out, a temporary folder."""
    timeout: float = 600.0
    """Seconds that one run may take."""


def verify(
    subject: Subject,
    strategies: Sequence[str] | None = None,
    settings: Settings | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Report:
    """Run and compare. Without `strategies`, all that there are; those whose library is missing are listed as such."""
    settings = settings or Settings()
    variants = [read_variant(label) for label in strategies or [name for name in STRATEGIES if name != REFERENCE]]
    with _folder(settings) as folder:
        return _Verification(subject, settings, folder, say).run(variants)


class _Verification:
    def __init__(self, subject: Subject, settings: Settings, folder: Path, say: Callable[[str], None]) -> None:
        self._subject, self._settings, self._folder, self._say = subject, settings, folder, say
        self._reference: Record
        self._noise: Curve

    def run(self, variants: Sequence[Variant]) -> Report:
        report = Report(self._settings.steps, self._settings.tolerance)
        reference = Variant(REFERENCE, REFERENCE, {"strategy.name": REFERENCE})
        self._reference = self._must(reference, "reference", {})
        against = {"record.against": str(self._folder / "reference" / "record")}
        nudged = self._must(reference, "nudged", {**against, "record.nudge": "true"})
        self._noise = rounding(nudged, self._reference)
        row = Row("single, nudged", YARDSTICK)
        start = self._noise[0]
        self._measure(row, nudged)
        if max(start.values(), default=0.0) > _NUDGE or not row.same_batches:
            what = "weights" if row.same_batches else "data"
            raise DistributedTrainingError(
                f"two runs of it with one process start from different {what}, so there is nothing to compare; "
                f"seed what makes the {what}: torch.manual_seed(0)"
            )
        report.rows.append(row)
        report.judged_steps, report.notes = max(self._noise), self._notes()
        report.rows += [self._row(number, variant, against) for number, variant in enumerate(variants)]
        return report

    def _must(self, variant: Variant, name: str, extra: dict[str, str]) -> Record:
        """A run without which there is nothing to compare."""
        outcome, record = self._train(variant, name, extra)
        if record is None or outcome.problem:
            raise DistributedTrainingError(
                "\n    ".join([f"the {name} run, strategy=single, failed: {outcome.problem}", *outcome.output])
            )
        return record

    def _row(self, number: int, variant: Variant, against: dict[str, str]) -> Row:
        need = needs(variant.strategy)
        if not need.installed:
            note = f"pip install 'distributed-training[{need.extra}]'"
            return Row(variant.label, ABSENT, notes=[note])
        outcome, record = self._train(variant, f"{number}-{variant.strategy}", against)
        row = Row(variant.label, PASS)
        if record is not None and record.length:
            self._compare(row, record)
        done = record.length if record is not None else 0
        if outcome.problem or done < self._reference.length:
            row.result, row.output = FAIL, outcome.output
            row.notes.insert(0, f"{outcome.problem or 'ended'}, at {done} of {self._reference.length} steps")
        return row

    def _measure(self, row: Row, record: Record) -> Deviation:
        found = measure(record, self._reference, self._settings.tolerance, self._noise)
        row.world_size = record.facts["ranks"]
        row.loss, row.weights, row.tensor = found.loss, found.weights, found.tensor
        row.other_batch = first_other_batch(record, self._reference)
        row.same_batches = row.other_batch is None and record.facts["data"] == self._reference.facts["data"]
        return found

    def _compare(self, row: Row, record: Record) -> None:
        found = self._measure(row, record)
        row.first_step, row.where = found.first_step, found.where
        if not record.facts["exact"]:
            row.result = LOSSY
            row.notes.append(f"rounds on purpose; largest difference in {found.tensor or 'no tensor'}")
        elif found.first_step is not None:
            row.result = FAIL
            row.notes.append(
                f"{found.where} differs by {found.found:.1e} after step {found.first_step}, where "
                f"{found.allowed:.1e} is allowed; {self._likely_cause(record)}"
            )
        if not row.same_batches:
            row.result = FAIL
            where = f"step {row.other_batch} used" if row.other_batch is not None else "it has"
            row.notes.insert(0, f"{where} other samples than single; is all that makes the data seeded?")

    def _likely_cause(self, record: Record) -> str:
        if record.facts["ranks"] > 1 and record.facts["batchnorm"] and not record.facts["sync_batchnorm"]:
            return "each rank's batch norm sees its own samples only: set strategy.sync_batchnorm=true"
        if any(line.get("random") for line in self._reference.steps.values()):
            return "the model draws random numbers, which differ by rank: verify it with dropout off"
        return "this is not the training of single"

    def _notes(self) -> list[str]:
        """What to know before reading the table."""
        reference, noise, settings = self._reference, self._noise, self._settings
        allowed = f"allowed is {settings.tolerance:g} or ten times the yardstick, single with its last bits changed"
        notes = [f"{reference.length} steps; differences are relative to single; {allowed}"]
        if reference.length < settings.steps:
            notes.append(f"the training has no more than {reference.length} of the {settings.steps} steps asked for")
        if max(noise) < reference.length:
            notes.append(
                f"rounding alone grows past {SENSITIVE:g} at step {max(noise) + 1}: only the steps before it are "
                "judged; a smaller training.lr or a longer warm-up lets more of them be"
            )
        if any(line.get("random") for line in reference.steps.values()):
            notes.append(
                "the model draws random numbers (dropout or the like): ranks draw others than one process does, so "
                "trainings can be equal only with dropout off"
            )
        if reference.facts["batchnorm"] and not reference.facts["sync_batchnorm"]:
            notes.append(
                "the model has batch norm: over ranks it is the same training only with strategy.sync_batchnorm=true"
            )
        if not reference.facts["data"]:
            notes.append("the batches come from an iterable without sample ids: only their sizes could be compared")
        return notes

    def _train(self, variant: Variant, name: str, extra: dict[str, str]) -> tuple[Outcome, Record | None]:
        folder, need = self._folder / name, needs(variant.strategy)
        ranks = 1 if need.launcher == "none" else self._settings.nproc
        program, variables = self._subject.command({**self._forced(folder), **variant.settings, **extra})
        began = time.monotonic()
        outcome = run_program(need.launcher, ranks, program, variables, folder, self._settings.timeout)
        record = read_record(folder / "record")
        if record is None and not outcome.problem:
            outcome = Outcome(
                "no training was recorded; a program's Trainer must train, and take its settings from the environment: "
                "leave out config=, or give it get_config()",
                outcome.output,
            )
        self._say(f"{variant.label} ({name}): {outcome.problem or 'done'}, {time.monotonic() - began:.0f} s")
        return outcome, record

    def _forced(self, folder: Path) -> dict[str, str]:
        """Settings that make a short run of the user's training which touches nothing of theirs."""
        return {
            "record.folder": str(folder / "record"),
            "run.root": str(folder),
            "run.name": "run",
            "run.stop_after_steps": str(self._settings.steps),
            "run.progress": "off",
            "checkpoint.resume": "never",
            "checkpoint.every_epochs": "0",
            "checkpoint.every_steps": "null",
            "early_stopping.enabled": "false",
            "tracking.trackers": "[]",
            "training.type": "auto",  # the strategy is named
        }


@contextmanager
def _folder(settings: Settings) -> Iterator[Path]:
    if settings.folder is None:
        with tempfile.TemporaryDirectory(prefix="dtrain-verify-") as temporary:
            yield Path(temporary)
        return
    folder = settings.folder.resolve()
    if folder.exists() and any(folder.iterdir()):
        raise RunDirectoryError(f"{folder}: not empty; give --folder a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    yield folder
