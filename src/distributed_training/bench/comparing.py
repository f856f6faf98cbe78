"""Two reports side by side: what became better or worse by more than the noise of both."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from distributed_training.bench import facts
from distributed_training.bench.figures import BenchReport, Figure, PartResult
from distributed_training.bench.measure import margin_of
from distributed_training.bench.page import number
from distributed_training.bench.tables import Table, markdown_table
from distributed_training.runtime.errors import BenchError

Verdict = Literal["REGRESSION", "improvement", "", "changed", "too noisy"]


@dataclass(frozen=True)
class Change:
    """One figure in both reports."""

    before: Figure
    after: Figure
    of: Literal["value", "ratio"]
    """Whether values are compared, or ratios to the reference, which carry over to other machines."""
    old: float
    new: float
    margin: float
    """Relative change that noise explains, 19 times of 20."""
    threshold: float

    @property
    def change(self) -> float:
        """Relative change: 0.1 is a tenth more."""
        return self.new / self.old - 1.0 if self.old else (math.inf if self.new else 0.0)

    @property
    def verdict(self) -> Verdict:
        """What it means."""
        if abs(self.change) <= self.threshold:
            return ""
        if abs(self.change) <= self.margin:
            return "too noisy"
        if self.after.better == "neither":
            return "changed"
        return "improvement" if (self.change > 0) == (self.after.better == "higher") else "REGRESSION"


@dataclass(frozen=True)
class Changes:
    """All that two reports have in common."""

    changes: list[Change]
    notes: list[str]

    @property
    def regressions(self) -> list[Change]:
        """What became worse."""
        return [change for change in self.changes if change.verdict == "REGRESSION"]

    def markdown(self) -> str:
        """A table with the notes before it and a sentence after it."""
        head = ("part", "case", "quantity", "variant", "compared", "before", "after", "change", "noise", "")
        table = Table("", head, [_row(change) for change in self.changes])
        worse = len(self.regressions)
        better = sum(change.verdict == "improvement" for change in self.changes)
        noisy = sum(change.verdict == "too noisy" for change in self.changes)
        said = f"{len(self.changes)} figures: {worse} worse, {better} better"
        said += f", {noisy} too noisy to conclude (raise --rounds)" if noisy else ""
        return "\n".join([*[f"- {note}" for note in self.notes], "", markdown_table(table), "", f"{said}."]) + "\n"


def compare_reports(before: BenchReport, after: BenchReport, threshold: float = 0.05) -> Changes:
    """Compare figures of the same name. On different machines only ratios are compared: seconds mean nothing there."""
    notes, same = _differences(before, after)
    changes = []
    parts = {part.name: part for part in before.parts}
    for part in after.parts:
        if part.name in parts:
            found = _part(parts[part.name], part, same, threshold)
            changes += [change for change in found if change.after.better != "neither" or change.verdict]
    if not changes:
        kinds = " and ".join(", ".join(p.name for p in r.parts if p.figures) or "none" for r in (before, after))
        wanted = "" if same else " with a ratio, and on different machines only ratios can be compared"
        raise BenchError(f"the reports have no figure in common{wanted} (parts: {kinds}); run the same parts in both")
    return Changes(changes, notes)


def _part(before: PartResult, after: PartResult, same: bool, threshold: float) -> list[Change]:
    known = {figure.key: figure for figure in before.figures}
    changes = []
    for new in after.figures:
        old = known.get(new.key)
        if old is None or old.unit != new.unit or old.better != new.better:
            continue
        ratios = before.comparison(old), after.comparison(new)
        if ratios[0] is not None and ratios[1] is not None and old.reference == new.reference:
            pair = [ratio.ratios for ratio in ratios if ratio is not None]
            medians = ratios[0].median, ratios[1].median
            changes.append(Change(old, new, "ratio", *medians, _noise(*pair), threshold))
        if same or new.unit == "":  # a figure without unit, such as an efficiency, is a ratio itself
            changes.append(Change(old, new, "value", old.median, new.median, _noise(old.values, new.values), threshold))
    return changes


def _noise(before: list[float], after: list[float]) -> float:
    """Margin of the quotient of two medians. What was measured once, such as memory, has no noise that is known."""
    return math.hypot(*(margin_of(values) if len(values) > 1 else 0.0 for values in (before, after)))


def _differences(before: BenchReport, after: BenchReport) -> tuple[list[str], bool]:
    unlike = [name for name in facts.SAME if before.machine.get(name) != after.machine.get(name)]
    notes = [
        f"DIFFERENT MACHINES: {name} is {before.machine.get(name, 'none')} before and "
        f"{after.machine.get(name, 'none')} after"
        for name in unlike
    ]
    if unlike:
        notes.append("so only ratios are compared; values in seconds or samples/s say nothing across machines")
    names = dict.fromkeys([*before.versions, *after.versions])
    notes += [
        f"{name}: {before.versions.get(name, 'none')} before, {after.versions.get(name, 'none')} after"
        for name in names
        if before.versions.get(name) != after.versions.get(name)
    ]
    for word, report in (("before", before), ("after", after)):
        if report.interrupted:
            notes.append(f"the report {word} was interrupted")
    return notes, not unlike


def _row(change: Change) -> tuple[str, ...]:
    figure = change.after
    unit = f" {figure.unit}" if change.of == "value" and figure.unit else ""
    compared = f"to {figure.reference}" if change.of == "ratio" else "value"
    margin = f"{change.margin:.1%}" if math.isfinite(change.margin) else "unknown"
    cells = (figure.part, figure.case, figure.quantity, figure.variant, compared)
    return (
        *cells,
        number(change.old) + unit,
        number(change.new) + unit,
        f"{change.change:+.1%}",
        margin,
        change.verdict,
    )
