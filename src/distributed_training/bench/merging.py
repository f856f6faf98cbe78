"""Several reports of one machine as one: parts and cases may be measured on different days."""

from __future__ import annotations

from collections.abc import Sequence

from distributed_training.bench.figures import BenchReport, PartResult
from distributed_training.runtime.errors import BenchError


def merge_reports(reports: Sequence[tuple[str, BenchReport]]) -> BenchReport:
    """One report of all, each given with its name. What was measured again later takes the place of the earlier."""
    first_name, first = reports[0]
    for name, report in reports[1:]:
        _check_alike(first_name, first, name, report)
    in_order = sorted((report for _, report in reports), key=lambda report: report.created)
    merged = BenchReport(machine=first.machine, versions=first.versions, created=in_order[-1].created)
    parts: dict[str, PartResult] = {}
    for report in in_order:
        for part in report.parts:
            parts[part.name] = _merged(parts[part.name], part) if part.name in parts else _with_cases(part)
    merged.parts = list(parts.values())
    return merged


def _check_alike(first_name: str, first: BenchReport, name: str, report: BenchReport) -> None:
    """Figures of different machines or versions side by side would be read as a comparison."""
    for what, mine, theirs in (
        ("machine", first.machine, report.machine),
        ("versions", first.versions, report.versions),
    ):
        for key in mine.keys() | theirs.keys():
            if mine.get(key) != theirs.get(key):
                raise BenchError(
                    f"{first_name} and {name} differ in {what}: {key} is {mine.get(key)} and {theirs.get(key)}; "
                    "merge reports of one machine and one set of versions, or use `dtrain bench compare`"
                )


def _merged(before: PartResult, after: PartResult) -> PartResult:
    after = _with_cases(after)
    again = set(after.groups())
    kept = [figure for figure in before.figures if (figure.case, figure.quantity) not in again]
    return PartResult(
        name=after.name,
        title=after.title,
        about=after.about,
        figures=kept + after.figures,
        notes=list(dict.fromkeys([*before.notes, *after.notes])),
        skipped=before.skipped | after.skipped,
        plots=list({plot.title: plot for plot in [*before.plots, *after.plots]}.values()),
        command=" && ".join(filter(None, (before.command, after.command))),
        seconds=before.seconds + after.seconds,
        problem="; ".join(filter(None, (before.problem, after.problem))),
    )


def _with_cases(part: PartResult) -> PartResult:
    """The part, its problem said of its own cases."""
    cases = list(dict.fromkeys(figure.case for figure in part.figures))
    if part.problem and cases and not part.problem.startswith(cases[0]):
        part.problem = f"{', '.join(cases)}: {part.problem}"
    return part
