"""What is seen of a search while it runs."""

from __future__ import annotations

import io
import sys
import types

import pytest
from rich.console import Console

from distributed_training.tuning import live
from distributed_training.tuning.live import LiveTable
from distributed_training.tuning.records import Search, Trial

SEARCH = Search(name="s", objectives={"val_accuracy": "max"}, samples=10, time_budget=3600.0)


def trial(name: str, status: str, value: float | None = None, epoch: int = 1, **parameters: float) -> Trial:
    metrics = {} if value is None else {"val_accuracy": value}
    history = [] if value is None else [(float(epoch), value)]
    return Trial(name, parameters, status, metrics, metrics, history, seconds=61.0)  # type: ignore[arg-type]


BEGINNING = [trial("a", "running", 0.5, 2, lr=0.1), trial("b", "running", lr=0.001), trial("c", "pending")]
LATER = [
    trial("a", "completed", 0.9, 5, lr=0.1),
    trial("b", "stopped", 0.4, 2, lr=0.001),
    Trial("c", {"lr": 0.5}, "failed", error="Traceback\nValueError: [red] is no colour"),
    trial("d", "running", 0.95, 3, lr=0.2),
]


def test_plain_lines_say_what_ended_and_what_is_best(capsys: pytest.CaptureFixture[str]) -> None:
    table = LiveTable(SEARCH, "plain")
    table.update(BEGINNING)
    assert capsys.readouterr().err == ""  # nothing has ended
    table.update(LATER)
    table.update(LATER)  # once is enough
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "trial a  completed  val_accuracy 90.00%  lr=0.1  best so far",
        "trial b  stopped early after epoch 2  val_accuracy 40.00%  lr=0.001",
        "trial c  failed  lr=0.5  ValueError: [red] is no colour",
    ]
    table.close()
    (last,) = capsys.readouterr().err.splitlines()
    assert last.startswith(
        "3/10 trials: 1 running, 1 completed, 1 stopped early, 1 failed · best val_accuracy 95.00% (trial d)"
    )
    assert last.endswith("left")


def test_a_table_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=140, color_system=None)
    monkeypatch.setattr(live, "console", lambda: console)
    table = LiveTable(SEARCH, "bar", epochs=5)
    table.update(BEGINNING)
    shown = screen.getvalue()
    for expected in (
        "0/10 trials: 1 pending, 2 running",
        "2/5",
        "50.00%",
        "lr=0.001",
        "val_accuracy",
        "0:01:01",
        "left",
    ):
        assert expected in shown, expected
    table._next = 0.0
    table.update(LATER)
    table.close()
    table.close()
    end = screen.getvalue()[len(shown) :]
    for expected in ("3/10 trials", "ValueError: [red] is no colour", "best so far", "3/5", "95.00%"):
        assert expected in end, expected


def test_a_narrow_terminal_shortens_only_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=70, color_system=None)
    monkeypatch.setattr(live, "console", lambda: console)
    table = LiveTable(SEARCH, "bar", epochs=5)
    table.update([trial("0001", "stopped", 0.5, 2, learning_rate=0.1, weight_decay=0.25, momentum=0.125)])
    table.close()
    for expected in ("trial", "0001", "stopped early", "2/5", "50.00%", "0:01:01", "learning_rate=0.1", "…"):
        assert expected in screen.getvalue(), expected


def test_a_table_below_the_cell_of_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    pages: list[str] = []

    class Handle:
        def update(self, html: str) -> None:
            pages.append(html)

    def display(html: str, display_id: bool) -> Handle:
        pages.append(html)
        return Handle()

    shell = types.SimpleNamespace(kernel=object())
    display_module = types.SimpleNamespace(HTML=str, display=display)
    monkeypatch.setitem(
        sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell, display=display_module)
    )
    monkeypatch.setitem(sys.modules, "IPython.display", display_module)
    table = LiveTable(SEARCH, "auto")
    table.update([*BEGINNING, trial("<b>", "running", 0.7)])
    table.update(LATER)
    table.close()
    assert "&lt;b&gt;" in pages[0]
    assert "<progress" in pages[-1]
    assert "3/10 trials" in pages[-1]


def test_off_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    table = LiveTable(SEARCH, "off")
    table.update(LATER)
    table.close()
    assert capsys.readouterr() == ("", "")


def test_without_a_number_of_trials_or_a_budget() -> None:
    table = LiveTable(Search(name="s"), "off")
    table.update([])
    assert table.summary() == "0 trials · 0:00:00"
