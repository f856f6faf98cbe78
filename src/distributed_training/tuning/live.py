"""What a person sees while a search runs: a table on a terminal or in a notebook, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from html import escape
from typing import Any

from distributed_training.training.notebook import Area, bar, line
from distributed_training.training.progress import console, kind_of_display
from distributed_training.tuning.axes import parameters_text
from distributed_training.tuning.page import shown
from distributed_training.tuning.records import Search, Trial
from distributed_training.tuning.standings import best_trial, count_text, ranked, status_text

_REFRESH = 0.25  # seconds between two pictures
_LINE_EVERY = 30.0  # seconds after which plain lines say that the search is still going
_FINISHED, _RUNNING = 5, 12  # rows
Row = tuple[str, str, str, str, str, str]
HEAD = ("trial", "status", "epoch", "value", "time", "parameters")


class LiveTable:
    """Shows a search: how many trials there are of each kind, the running ones, the best so far, the time left.

    For one thread, the one that runs the search. `update` is cheap when nothing is due, so that it may be called with
    every result.
    """

    def __init__(self, search: Search, kind: str = "auto", epochs: float | None = None) -> None:
        """
        Args:
            search: what is sought; `samples` and `time_budget` say how far it goes.
            kind: as `run.progress`: auto, bar, plain or off.
            epochs: how long a trial trains that is not stopped, if that is known.
        """
        self._search, self._kind, self._epochs = search, kind_of_display(kind), epochs
        self._began = self._next = time.monotonic()
        self._said = self._began
        self._told: set[str] = set()
        self._best: str | None = None
        self._trials: Sequence[Trial] = ()
        self._live: Any = None
        self._area = Area()

    def update(self, trials: Sequence[Trial]) -> None:
        """Show how the trials stand."""
        self._trials = trials
        news = [trial for trial in trials if trial.over and trial.id not in self._told]
        self._told |= {trial.id for trial in news}
        for trial in news:
            self._tell(trial)
        now = time.monotonic()
        if self._kind == "plain" and now - self._said > _LINE_EVERY:
            self._say(self.summary())
        if now >= self._next and self._kind in ("bar", "notebook"):
            self._next = now + _REFRESH
            self._draw()

    def close(self) -> None:
        """The search is over: leave its last picture."""
        if self._kind == "plain" and self._trials:
            self._say(self.summary())
        elif self._kind in ("bar", "notebook") and (self._trials or self._live is not None):
            self._draw()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def summary(self) -> str:
        """All in a line: `12/50 trials: 2 running, 7 completed, 3 stopped early · best val_loss 0.21 (trial 5)`."""
        search, kinds = self._search, count_text(self._trials)
        over = sum(trial.over for trial in self._trials)
        of = f"/{search.samples}" if search.samples else ""
        parts = [f"{over}{of} trials" + (f": {kinds}" if kinds else "")]
        if (best := best_trial(search, self._trials)) is not None:
            parts.append(f"best {search.metric} {shown(search.metric, best.value(search.metric))} (trial {best.id})")
        parts.append(self.clock())
        return " · ".join(parts)

    def clock(self) -> str:
        """The time so far, and what is left of the time that was given."""
        passed = time.monotonic() - self._began
        if self._search.time_budget is None:
            return _clock(passed)
        return f"{_clock(passed)}, {_clock(max(0.0, self._search.time_budget - passed))} left"

    def rows(self) -> tuple[list[Row], list[Row]]:
        """The trials that run, and the best of those that are over."""
        running = [trial for trial in self._trials if trial.status in ("running", "paused")]
        over = [trial for trial in ranked(self._search, self._trials) if trial.over]
        return [self._row(t) for t in running[:_RUNNING]], [self._row(t) for t in over[:_FINISHED]]

    def _row(self, trial: Trial) -> Row:
        metric = self._search.metric
        newest = trial.last.get(metric)
        value = shown(metric, trial.value(metric) if trial.over else newest)
        epoch = "–" if trial.epoch is None else f"{trial.epoch:g}" + (f"/{self._epochs:g}" if self._epochs else "")
        return (
            trial.id,
            status_text(trial.status),
            epoch,
            value,
            _clock(trial.seconds),
            parameters_text(trial.parameters),
        )

    def _tell(self, trial: Trial) -> None:
        """A line that stays: each trial's end where there is no table, and else only what is remarkable."""
        best = best_trial(self._search, [t for t in self._trials if t.over])
        new_best = best is not None and best.id != self._best and best.id == trial.id
        self._best = best.id if best is not None else None
        if self._kind == "plain" or new_best or trial.status == "failed":
            values = [f"{m} {shown(m, trial.value(m))}" for m in self._search.objectives if trial.value(m) is not None]
            epoch = f" after epoch {trial.epoch:g}" if trial.status == "stopped" and trial.epoch is not None else ""
            words = [
                f"trial {trial.id}",
                status_text(trial.status) + epoch,
                *values,
                parameters_text(trial.parameters),
            ]
            if trial.status == "failed" and trial.error.strip():
                words.append(trial.error.strip().splitlines()[-1][:300])
            if new_best:
                words.append("best so far")
            self._say("  ".join(word for word in words if word))

    def _say(self, text: str) -> None:
        self._said = time.monotonic()
        if self._kind == "plain":
            sys.stderr.write(text + "\n")
            sys.stderr.flush()
        elif self._kind == "bar":
            console().print(text, highlight=False, markup=False)

    def _draw(self) -> None:
        if self._kind == "notebook":
            self._area.show(self._html())
            return
        if self._live is None:
            from rich.live import Live

            self._live = Live(console=console(), auto_refresh=False)  # drawn by this thread alone
            self._live.start()
        self._live.update(self._picture(), refresh=True)

    def _picture(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        running, over = self.rows()
        table = Table(box=None, pad_edge=False, header_style="dim", expand=False)
        head = [self._search.metric if name == "value" else name for name in HEAD]
        widths = [max(map(len, column)) for column in zip(head, *running, *over)]
        room = console().width - sum(widths[:-1]) - 2 * len(widths)  # the parameters get what is left
        for name, width in zip(head, [*widths[:-1], max(10, min(room, widths[-1]))]):
            table.add_column(name, no_wrap=True, overflow="ellipsis", width=width)
        for row in running:
            table.add_row(*map(Text, row))
        if running and over:
            table.add_section()
        for place, row in enumerate(over):
            table.add_row(*map(Text, row), style="bold" if place == 0 else "dim")
        return Group(Text(self.summary()), table) if running or over else Text(self.summary())

    def _html(self) -> str:
        running, over = self.rows()
        head = "".join(f"<th>{escape(self._search.metric if n == 'value' else n)}</th>" for n in HEAD)
        body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in [*running, *over])
        done = sum(trial.over for trial in self._trials)
        top = bar(done, self._search.samples, self.summary()) if self._search.samples else line(self.summary())
        return f"{top}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if body else top


def _clock(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}"
