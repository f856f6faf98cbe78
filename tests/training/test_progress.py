"""What a person sees: plain lines elsewhere, bars on a terminal."""

from __future__ import annotations

import io
import re
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console
from tests.training.examples import loader, trainer

from distributed_training.training import progress
from distributed_training.training.progress import BarProgress, PlainProgress, figures, make_progress


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        ({}, ""),
        ({"train_loss": 0.12345, "lr": 1.0, "epoch": 2.0}, "loss 0.1235"),
        ({"val_loss": 1.0, "val_accuracy": 0.5}, "val_loss 1.0000  val_accuracy 0.5000"),
        ({"train_loss": 1.0, "samples_per_second": 12345.6}, "loss 1.0000  12,346 samples/s"),
    ],
)
def test_figures(metrics: dict[str, float], text: str) -> None:
    assert figures(metrics) == text


def test_the_kind_follows_the_setting_and_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_progress("off") is None
    assert isinstance(make_progress("bar"), BarProgress)
    assert isinstance(make_progress("plain"), PlainProgress)
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: True))
    assert isinstance(make_progress("auto"), BarProgress)
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: False))
    assert isinstance(make_progress("auto"), PlainProgress)


def test_plain_lines_go_to_standard_error_one_an_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    trainer(run__progress="plain").train(loader(), loader(8), epochs=2)
    said = capsys.readouterr()
    assert said.out == ""
    first, second = said.err.splitlines()
    number = r"\d\.\d{{4}}"
    pattern = (
        rf"epoch {{}}/2  loss {number}  val_loss {number}  val_accuracy {number}  [\d,]+ samples/s  ETA \d:\d\d:\d\d"
    )
    assert re.fullmatch(pattern.format(1), first)
    assert re.fullmatch(pattern.format(2), second)


def test_a_long_epoch_says_something_in_between(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_LINE_EVERY", -1.0)
    trainer(run__progress="plain").train(loader(16), epochs=1)
    assert [line.split("  ")[0] for line in capsys.readouterr().err.splitlines()] == ["step 1", "step 2", "epoch 1/1"]


def test_a_stream_of_unknown_length_has_no_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    class Stream:
        def __iter__(self):
            return iter(loader(16))

    trainer(run__progress="plain").train(Stream(), epochs=1)
    assert capsys.readouterr().err.splitlines()[0].endswith("ETA -:--:--")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What a terminal of 200 columns would receive."""
    out = io.StringIO()
    monkeypatch.setattr(progress, "_console", Console(file=out, force_terminal=True, width=200))
    return out


def test_a_bar_shows_epoch_steps_and_figures_and_leaves_a_line_an_epoch(
    terminal: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_REFRESH", 0.0)
    trainer(run__progress="bar").train(loader(), loader(8), epochs=2)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue())
    assert re.search(r"epoch 1/2  loss \d\.\d{4}  val_loss", text)
    assert re.search(r"epoch 2/2  loss \d\.\d{4}  val_loss", text)
    assert "12/12" in text
    assert "ETA 0:00:00" in text


def test_a_bar_ends_when_the_training_fails(terminal: io.StringIO) -> None:
    """A bar that goes on has a thread, which the test would leave behind."""
    own = trainer(run__progress="bar")
    own.strategy.step = lambda loss: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(ZeroDivisionError):
        own.train(loader(), epochs=1)
    assert "\x1b[?25h" in terminal.getvalue(), "the cursor is shown again"


def test_a_bar_that_never_started_ends_quietly() -> None:
    BarProgress().on_train_end(trainer(), "failed")


def test_there_is_one_console_and_it_is_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_console", None)
    assert progress.console() is progress.console()
    assert progress.console().stderr
