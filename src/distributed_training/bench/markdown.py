"""A report as Markdown: the machine, then part by part the plots, the tables and what to know about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distributed_training.bench.figures import BenchReport, PartResult
from distributed_training.bench.page import duration
from distributed_training.bench.tables import markdown_table, tables, too_noisy

METHOD = (
    "Variants take turns, every other round backwards, after warm-up rounds that are thrown away. A figure is the "
    "median over the rounds; its spread is the distance between the quartiles as a share of it. A ratio is the "
    "median of the ratios of single rounds, so that drift of the machine cancels: read ratios first."
)


def to_markdown(report: BenchReport, plots: Mapping[str, Sequence[tuple[str, str]]]) -> str:
    """The whole report. `plots` gives for each part the (title, path as seen from the report) of its images."""
    command = [f"`{report.command}`"] if report.command else []
    lines = ["# Benchmark", "", *command, f"{machine_line(report)}.", "", METHOD]
    if report.interrupted:
        lines += ["", "**Interrupted: only the parts below were done.**"]
    for part in report.parts:
        lines += ["", *_part(part, plots.get(part.name, ()))]
    return "\n".join(lines) + "\n"


def machine_line(report: BenchReport) -> str:
    """The machine and the versions that matter most, in one line."""
    machine, versions = report.machine, report.versions
    words = [f"{machine['gpus']} x {machine['gpu']}"] if "gpu" in machine else []
    words += [f"{machine.get('cpu', 'unknown processor')}, {machine.get('cores', '?')} cores"]
    words += [f"{name} {versions[name]}" for name in ("torch", "cuda", "python") if name in versions]
    words += [f"driver {machine['driver']}"] if "driver" in machine else []
    return f"{' · '.join(words)} · {report.created}"


def _part(part: PartResult, plots: Sequence[tuple[str, str]]) -> list[str]:
    lines = [f"## {part.title}", "", part.about]
    if part.problem:
        lines += ["", f"**Not measured: {part.problem}**" if not part.figures else f"**Incomplete: {part.problem}**"]
    if part.command:
        commands = [f"`{command}`" for command in part.command.split(" && ")]
        lines += ["", "  \n".join(commands) + (f" took {duration(part.seconds)}." if part.seconds else "")]
    for title, path in plots:
        lines += ["", f"![{title}]({path})"]
    for table in tables(part):
        lines += ["", f"**{table.title}**", "", markdown_table(table)]
    notes = [*part.notes, *[f"{name}: not measured, {reason}" for name, reason in part.skipped.items()]]
    noise = too_noisy(part)
    if notes or noise:
        lines += ["", *[f"- {note}" for note in notes], *([f"- **{noise}**"] if noise else [])]
    return lines
