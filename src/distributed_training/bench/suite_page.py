"""The HTML page of a benchmark: one file with all plots and tables, in the look of our reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from distributed_training.bench.figures import BenchReport, PartResult
from distributed_training.bench.markdown import METHOD, machine_line
from distributed_training.bench.page import Image, duration, figure, table, tiles_section, whole_page
from distributed_training.bench.tables import tables, too_noisy

_CSS = """
h3 { font-size: 14px; font-weight: 600; margin: 18px 0 6px; }
code { font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
.part .plots { margin: 14px 0; border: 0; }
.part td:first-child { color: var(--text); }
ul { padding-left: 20px; color: var(--muted); }
li.note { margin: 0; }
"""


def to_html(report: BenchReport, images: Mapping[str, Sequence[Image]]) -> str:
    """The whole page. All text of the report is escaped: it may come from a file of somebody else's."""
    state = '<span class="badge warn">interrupted</span>' if report.interrupted else ""
    sections = [
        f"<header><h1>Benchmark</h1>{state}</header>",
        f'<p class="muted">{escape(machine_line(report))}</p>',
        f'<p class="muted"><code>{escape(report.command)}</code></p>' if report.command else "",
        tiles_section([(part.title, *_headline(part)) for part in report.parts]),
        f'<section><h2>How it is measured</h2><p class="muted">{escape(METHOD)}</p></section>',
        *[_section(part, images.get(part.name, ())) for part in report.parts],
        f"<section><h2>Machine</h2>{_facts(report.machine)}</section>",
        f"<details><summary>Versions</summary>{_facts(report.versions)}</details>",
        '<footer class="muted">Made by dtrain bench of distributed_training.</footer>',
    ]
    return whole_page("Benchmark", sections, _CSS)


def _headline(part: PartResult) -> tuple[str, str]:
    """(figure, what it is): the ratio furthest from one that is certain, or how it ended."""
    if not part.figures:
        return "–", "not measured"
    found = [(part.comparison(f), f) for f in part.figures if f.better != "neither"]
    sure = [(c, f) for c, f in found if c is not None and c.differs and c.median > 0]
    if not sure:
        return str(len(part.figures)), "figures"
    best, of = max(sure, key=lambda pair: abs(pair[0].median - 1.0))
    return f"{best.median:.2f} x", f"{of.quantity}, {of.variant} to {of.reference}"


def _section(part: PartResult, images: Sequence[Image]) -> str:
    lines = [f'<section class="part" id="{escape(part.name)}"><h2>{escape(part.title)}</h2>']
    lines.append(f'<p class="muted">{escape(part.about)}</p>')
    if part.problem:
        word = "Incomplete" if part.figures else "Not measured"
        lines.append(f'<p class="note">{word}: {escape(part.problem)}</p>')
    if part.command:
        took = f" took {duration(part.seconds)}" if part.seconds else ""
        lines.append(f'<p class="muted"><code>{escape(part.command)}</code>{took}</p>')
    if images:
        lines.append('<div class="plots">' + "".join(figure(image) for image in images) + "</div>")
    for one in tables(part):
        lines.append(f"<h3>{escape(one.title)}</h3>{table(one.head, one.rows)}")
    notes = [*part.notes, *[f"{name}: not measured, {reason}" for name, reason in part.skipped.items()]]
    items = [f"<li>{escape(note)}</li>" for note in notes]
    items += [f'<li class="note">{escape(line)}</li>' for line in [too_noisy(part)] if line]
    if items:
        lines.append(f"<ul>{''.join(items)}</ul>")
    return "\n".join([*lines, "</section>"])


def _facts(facts: Mapping[str, object]) -> str:
    return table(("", ""), [(name.replace("_", " "), str(value)) for name, value in facts.items()])
