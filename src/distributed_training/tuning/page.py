"""The HTML page of a search: one self-contained file that can be mailed, in the looks of a run's report."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from distributed_training.bench.page import Html, Image, duration, figure, number, table, tiles_section, whole_page
from distributed_training.tuning.axes import parameters_text, short_names, value_text
from distributed_training.tuning.importance import Importance
from distributed_training.tuning.records import Search, SearchFolder, Trial
from distributed_training.tuning.standings import best_trial, count_text, pareto_front, ranked, status_text

TONES = {"completed": "good", "time is up": "good", "interrupted": "warn", "failed": "bad"}
MOST_ERROR = 4000  # characters of an error; the run's own folder has the rest

CSS = """
.plots figure { grid-column: 1 / -1; }
td pre { margin: 0; white-space: pre-wrap; font-size: 12px; }
a { color: inherit; } tr.best td { font-weight: 600; color: var(--text); } th, td { overflow-wrap: normal; }
.badge.small { font-size: 12px; padding: 0 8px; }
"""


def render_page(
    folder: SearchFolder, search: Search, trials: Sequence[Trial], found: Importance, images: Sequence[Image]
) -> str:
    """The whole page. Everything that comes from the search is escaped."""
    badge = f'<span class="badge {TONES.get(search.status, "")}">{escape(search.status)}</span>'
    sections = [
        f"<header><h1>{escape(search.name)}</h1>{badge}</header>",
        f'<p class="muted">{escape(_when(search, trials))}</p>',
        _tiles(search, trials),
        _best(folder, search, trials),
        '<section class="plots">' + "".join(figure(image) for image in images) + "</section>" if images else "",
        f'<section><h2>Importance</h2><p class="note">{escape(found.note)}</p></section>' if found.note else "",
        _front(folder, search, trials),
        _failures(folder, trials),
        f"<section><h2>All trials</h2>{_trials(folder, search, trials)}</section>",
        _settings(search),
        '<footer class="muted">Made by distributed_training from the records of this search.</footer>',
    ]
    return whole_page(search.name, sections, CSS)


def shown(metric: str, value: float | None) -> str:
    """A metric's value as people write it."""
    if value is None:
        return "–"
    return f"{value:.2%}" if "accuracy" in metric and 0 <= value <= 1 else number(value)


def _when(search: Search, trials: Sequence[Trial]) -> str:
    parts = []
    if search.started is not None:
        parts.append(f"started {datetime.fromtimestamp(search.started, UTC):%Y-%m-%d %H:%M} UTC")
    parts.append(f"{search.algorithm} search")
    if search.scheduler not in ("none", ""):
        parts.append(f"scheduler {search.scheduler}")
    if search.seed is not None:
        parts.append(f"seed {search.seed}")
    parts.append(" and ".join(f"{metric} {mode}" for metric, mode in search.objectives.items()))
    return " · ".join(parts)


def _tiles(search: Search, trials: Sequence[Trial]) -> str:
    tiles = []
    best = best_trial(search, trials)
    if best is not None:
        tiles.append((f"best {search.metric}", shown(search.metric, best.value(search.metric)), f"trial {best.id}"))
    tiles.append(
        ("trials", f"{len(trials):,}" + (f" of {search.samples:,}" if search.samples else ""), count_text(trials))
    )
    if search.started is not None and search.ended is not None:
        work = sum(trial.seconds for trial in trials)
        tiles.append(("time", duration(search.ended - search.started), f"{duration(work)} of training"))
    saved = _saved(trials)
    if saved:
        tiles.append(("epochs not trained", f"{saved:.0%}", "because hopeless trials were stopped"))
    if len(search.objectives) > 1:
        tiles.append(("Pareto front", f"{len(pareto_front(search, trials))} trials", " and ".join(search.objectives)))
    return tiles_section(tiles)


def _saved(trials: Sequence[Trial]) -> float:
    """The share of epochs that stopping spared, taking the longest completed trial as the length of all."""
    full = max((trial.epoch or 0.0 for trial in trials if trial.status == "completed"), default=0.0)
    stopped = [trial.epoch or 0.0 for trial in trials if trial.status == "stopped"]
    over = [min(trial.epoch or 0.0, full) for trial in trials if trial.status in ("completed", "stopped")]
    return 1 - sum(over) / (full * len(over)) if full and stopped else 0.0


def _best(folder: SearchFolder, search: Search, trials: Sequence[Trial]) -> str:
    best = best_trial(search, trials)
    if best is None:
        return '<section><h2>Best trial</h2><p class="note">No trial has reported a figure to compare.</p></section>'
    rows: list[tuple[str, str]] = [(key, value_text(value)) for key, value in best.parameters.items()]
    rows += [(metric, shown(metric, best.value(metric))) for metric in search.objectives]
    rows.append(("run", _link(folder, best)))
    how = ""
    if folder.best_file.is_file():
        how = f'<p class="muted">Train it again: <code>dtrain train {escape(str(folder.best_file))}</code></p>'
    return f"<section><h2>Best trial: {escape(best.id)}</h2>{table(('', ''), rows)}{how}</section>"


def _front(folder: SearchFolder, search: Search, trials: Sequence[Trial]) -> str:
    if len(search.objectives) < 2:
        return ""
    front = pareto_front(search, trials)
    what = "No other trial is as good in every objective and better in one."
    return (
        f'<section><h2>Pareto front</h2><p class="muted">{what}</p>{_trials(folder, search, front)}</section>'
        if front
        else ""
    )


def _failures(folder: SearchFolder, trials: Sequence[Trial]) -> str:
    rows = []
    for trial in trials:
        if trial.error:
            error = trial.error if len(trial.error) <= MOST_ERROR else "…" + trial.error[-MOST_ERROR:]
            what = f"failed {trial.attempts} times" if trial.attempts > 1 and trial.status == "failed" else trial.status
            summary = escape(error.strip().splitlines()[-1] if error.strip() else "")
            cell = Html(f"<details><summary>{summary}</summary><pre>{escape(error)}</pre></details>")
            rows.append(
                (
                    _link(folder, trial),
                    what,
                    parameters_text(trial.parameters, ", "),
                    cell if "\n" in error.strip() else error,
                )
            )
    if not rows:
        return ""
    return f"<section><h2>Errors</h2>{table(('trial', 'status', 'parameters', 'error'), rows)}</section>"


def _trials(folder: SearchFolder, search: Search, trials: Sequence[Trial]) -> str:
    """All trials, the best first, those without a figure last."""
    order = ranked(search, trials)
    there = {trial.id for trial in order}
    order += [trial for trial in trials if trial.id not in there]
    keys = list(dict.fromkeys(key for trial in trials for key in trial.parameters))
    labels = short_names(keys)
    head = ["trial", *search.objectives, *(labels[key] for key in keys), "status", "epochs", "time"]
    rows = []
    for trial in order:
        values = [value_text(trial.parameters[key]) if key in trial.parameters else "–" for key in keys]
        objectives = [shown(metric, trial.value(metric)) for metric in search.objectives]
        epochs = "–" if trial.epoch is None else f"{trial.epoch:g}"
        time = duration(trial.seconds) if trial.seconds else "–"
        rows.append([_link(folder, trial), *objectives, *values, status_text(trial.status), epochs, time])
    return table(head, rows)


def _settings(search: Search) -> str:
    rows = [(key, _spec(spec)) for key, spec in search.space.items()]
    if not rows:
        return ""
    return f"<details><summary>Space</summary>{table(('parameter', 'values'), rows)}</details>"


def _spec(spec: Any) -> str:
    if not isinstance(spec, dict):
        return value_text(spec)
    return ", ".join(f"{name} {value_text(value)}" for name, value in spec.items())


def _link(folder: SearchFolder, trial: Trial) -> str:
    """The trial's name, leading to its own report if it has one, or else to its folder."""
    if not trial.directory:
        return trial.id
    path = Path(trial.directory)
    place = path if path.is_absolute() else folder.path / path
    target = "report/index.html" if (place / "report" / "index.html").is_file() else ""
    base = place.resolve().as_uri() if path.is_absolute() else "../" + quote(path.as_posix())
    return Html(f'<a href="{escape(f"{base}/{target}")}">{escape(trial.id)}</a>')
