"""The HTML page of a report: one self-contained file that can be mailed, with light and dark looks."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from typing import Any

from distributed_training.bench.history import History
from distributed_training.bench.plots import direction

TONES = {"completed": "good", "stopped early": "good", "interrupted": "warn", "failed": "bad"}
NO_END = "running or killed"


class Html(str):
    """Text that is HTML already, and is not escaped again."""


@dataclass(frozen=True)
class Image:
    """One plot in both looks, as PNG."""

    title: str
    light: bytes
    dark: bytes
    over: str = "over steps"

    @property
    def alt(self) -> str:
        """What it shows, for those who cannot see it."""
        return f"{self.title} {self.over}".strip()


def render_page(name: str, history: History, config: str, images: Sequence[Image]) -> str:
    """The whole page. Everything that comes from the run is escaped: names of metrics and runs may hold anything."""
    status = history.status or NO_END
    sections = [
        f'<header><h1>{escape(name)}</h1><span class="badge {TONES.get(status, "")}">{escape(status)}</span></header>',
        f'<p class="muted">{escape(_when(history))}</p>',
        _tiles(history),
        '<section class="plots">' + "".join(figure(image) for image in images) + "</section>",
        f"<section><h2>Result</h2>{_result_table(history)}</section>" if history.status else "",
        f"<section><h2>Metrics</h2>{_metrics_table(history)}{_not_finite(history)}</section>",
        f"<section><h2>Machine and model</h2>{_facts_table(history.facts)}</section>" if history.facts else "",
        f"<details><summary>Configuration</summary><pre>{escape(config)}</pre></details>",
        '<footer class="muted">Made by distributed_training from the events of this run.</footer>',
    ]
    return whole_page(name, sections)


def whole_page(title: str, sections: Sequence[str], css: str = "") -> str:
    """A page of sections that are HTML already, empty ones left out. `css` adds to the looks of all reports."""
    return PAGE.format(title=escape(title), css=CSS + css, body="\n".join(section for section in sections if section))


def number(value: float) -> str:
    """A figure as people write it: 4 to 6 digits, thousands apart."""
    if not math.isfinite(value):
        return "not finite"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.5g}"


def duration(seconds: float) -> str:
    """A time span in its two largest units."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"


def _when(history: History) -> str:
    parts = []
    if history.started is not None:
        parts.append(f"started {datetime.fromtimestamp(history.started, UTC):%Y-%m-%d %H:%M} UTC")
    parts.append(f"{history.last_step:,} steps")
    parts += [f"resumed at step {step:,}" for step in history.resumed_at]
    return " · ".join(parts)


def _tiles(history: History) -> str:
    """The few figures that most readers came for."""
    tiles = []
    for metric in ("val_accuracy", "val_loss"):
        series = history.series.get(metric)
        best = series.best(direction(metric) or "min") if series else None
        if best:
            value = f"{best[1]:.2%}" if metric.endswith("accuracy") and 0 <= best[1] <= 1 else number(best[1])
            tiles.append((f"best {metric}", value, f"at step {best[0]:,}"))
    if train := history.series.get("train_loss"):  # the best of single batches would only be luck
        tiles.append(("last train_loss", number(train.last), f"at step {train.steps[-1]:,}"))
    speed = history.summary.get("samples_per_second")
    if speed is not None:
        tiles.append(("samples per second", number(speed), "over the whole run"))
    seconds = history.summary.get("seconds")
    if seconds is None and history.started is not None and history.ended is not None:
        seconds = history.ended - history.started
    if seconds is not None and math.isfinite(seconds):
        tiles.append(("time", duration(seconds), f"{history.last_step:,} steps"))
    return tiles_section(tiles)


def tiles_section(tiles: Sequence[tuple[str, str, str]]) -> str:
    """Figures in a row, each with a name above and a note below."""
    cells = (
        f'<div class="tile"><span>{what}</span><strong>{value}</strong><span>{note}</span></div>'
        for what, value, note in (map(escape, tile) for tile in tiles)
    )
    return '<section class="tiles">' + "".join(cells) + "</section>"


def figure(image: Image) -> str:
    """A plot in the look that the reader's machine asks for."""
    light, dark = (f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in (image.light, image.dark))
    source = f'<source media="(prefers-color-scheme: dark)" srcset="{dark}">'
    return f'<figure><picture>{source}<img src="{light}" alt="{escape(image.alt)}"></picture></figure>'


def _result_table(history: History) -> str:
    """What the trainer itself said at the end."""
    return table(("", ""), [("status", history.status or ""), *((k, number(v)) for k, v in history.summary.items())])


def _metrics_table(history: History) -> str:
    rows = []
    for name, series in history.series.items():
        mode = direction(name)
        best = series.best(mode) if mode else None
        best_cells = (number(best[1]), f"{best[0]:,}") if best else ("", "")
        rows.append((name, number(series.last), f"{series.steps[-1]:,}", *best_cells))
    return table(("metric", "last", "at step", "best", "at step"), rows)


def _not_finite(history: History) -> str:
    counts = {name: len(series.values) - len(series.finite()) for name, series in history.series.items()}
    told = ", ".join(f"{name} {count:,} times" for name, count in counts.items() if count)
    return f'<p class="note">Not finite (NaN or infinite): {escape(told)}.</p>' if told else ""


def _facts_table(facts: Mapping[str, Any]) -> str:
    return table(("", ""), [(name, str(value)) for name, value in _flat(facts)])


def _flat(facts: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for name, value in facts.items():
        if isinstance(value, Mapping):
            rows += _flat(value, f"{prefix}{name}.")
        elif isinstance(value, int) and not isinstance(value, bool):
            rows.append((f"{prefix}{name}", f"{value:,}"))
        else:
            rows.append((f"{prefix}{name}", "" if value is None else value))
    return rows


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of text, escaped. A cell that is `Html` is taken as it is."""
    titles = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    cells = ([cell if isinstance(cell, Html) else escape(cell) for cell in row] for row in rows)
    lines = ("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in cells)
    heading = f"<thead><tr>{titles}</tr></thead>" if any(head) else ""
    return f'<div class="scroll"><table>{heading}<tbody>{"".join(lines)}</tbody></table></div>'


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{css}</style>
</head>
<body><main>
{body}
</main></body>
</html>
"""

CSS = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #ffffff; --text: #1f2937; --muted: #6b7280; --line: #e5e7eb;
  --good: #047857; --warn: #b45309; --bad: #b91c1c; }
@media (prefers-color-scheme: dark) { :root { --page: #0d1117; --card: #161b22; --text: #e6edf3; --muted: #9aa4b2;
  --line: #2d343e; --good: #56d39b; --warn: #f0b35a; --bad: #ff8f85; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 40px 24px 56px; }
header { display: flex; align-items: center; gap: 14px; flex-wrap: wrap; }
h1 { font-size: 26px; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 0 0 12px; }
.muted { color: var(--muted); margin: 6px 0 0; }
.badge { border: 1px solid currentColor; border-radius: 999px; padding: 2px 12px; font-size: 13px; font-weight: 600;
  color: var(--muted); }
.badge.good { color: var(--good); } .badge.warn { color: var(--warn); } .badge.bad { color: var(--bad); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: 14px; margin: 24px 0 14px;
  padding: 0; background: none; border: 0; }
.tile, section, details { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: 14px 16px; display: flex; flex-direction: column; }
.tile span { color: var(--muted); font-size: 13px; }
.tile strong { font-size: 22px; line-height: 1.4; font-variant-numeric: tabular-nums; }
section, details { padding: 18px 20px; margin: 14px 0; }
.plots { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 14px; padding: 0; background: none;
  border: 0; }
.plots figure { margin: 0; padding: 12px; background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.plots figure:first-child, .plots figure:last-child:nth-child(even) { grid-column: 1 / -1; }
.plots img { display: block; width: 100%; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: left; color: var(--muted); font-weight: 500; }
th, td { padding: 6px 16px 6px 0; border-bottom: 1px solid var(--line); vertical-align: top; overflow-wrap: anywhere; }
tr:last-child td { border-bottom: 0; }
td { font-variant-numeric: tabular-nums; }
td:first-child { color: var(--muted); }
.note { color: var(--warn); margin: 12px 0 0; }
summary { cursor: pointer; font-weight: 600; font-size: 17px; }
pre { margin: 12px 0 0; overflow-x: auto; font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
footer { font-size: 13px; }
@media (max-width: 720px) { .plots { grid-template-columns: 1fr; } main { padding: 24px 14px 40px; } }
"""
