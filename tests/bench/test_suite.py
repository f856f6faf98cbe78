"""The frame: parts run one after the other, and what they found is written whatever happens."""

from __future__ import annotations

import os
import signal
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.bench.reports import a_part, a_report, figure
from tests.bench.test_report import Reader
from typer.testing import CliRunner

from distributed_training.bench import parts as all_parts
from distributed_training.bench.figures import PartResult
from distributed_training.bench.options import BenchOptions
from distributed_training.bench.output import Output
from distributed_training.bench.parts import PARTS, Part, part_named
from distributed_training.bench.records import read_report
from distributed_training.bench.suite import run_parts
from distributed_training.cli.main import app
from distributed_training.runtime.errors import BenchError, ConfigError

Install = Callable[[str, Callable[[BenchOptions], PartResult]], Part]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Make a part of a function."""

    def made(name: str, run: Callable[[BenchOptions], PartResult]) -> Part:
        module = types.ModuleType(f"{all_parts.__name__}.{name}")
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        part = Part(name, f"what {name} measures")
        monkeypatch.setitem(PARTS, name, part)
        return part

    return made


def found(name: str) -> Callable[[BenchOptions], PartResult]:
    """A part that measures two variants by turns."""

    def run(options: BenchOptions) -> PartResult:
        values = options.interleave({"1 process": lambda: 100.0, "2 processes": lambda: 190.0})
        return a_part(*[figure(v, m.values, part=name) for v, m in values.items()], name=name, title=name)

    return run


def test_what_cannot_run_is_named_and_does_not_stop_the_others(install: Install, tmp_path: Path) -> None:
    def impossible(options: BenchOptions) -> PartResult:
        raise BenchError("needs two GPUs")

    def broken(options: BenchOptions) -> PartResult:
        raise ZeroDivisionError("one of ours")

    chosen = [install("first", impossible), install("second", broken), install("third", found("third"))]
    said: list[str] = []
    output = Output(tmp_path / "reports" / "benchmark.md")
    report = run_parts(chosen, BenchOptions(rounds=3, say=said.append), output, "dtrain bench all --quick")
    assert [part.problem for part in report.parts] == ["needs two GPUs", "failed: ZeroDivisionError: one of ours", ""]
    text = output.markdown.read_text()
    assert "**Not measured: needs two GPUs**" in text
    assert "| 2 processes | 1.900 " in text
    assert "`dtrain bench third --quick` took" in text
    assert "![Speed-up](benchmark_plots/third_speed_up.png)" in text
    assert (output.plots / "third_speed_up.png").read_bytes().startswith(b"\x89PNG")
    assert read_report(output.json).parts[2].figures == report.parts[2].figures
    page = output.html.read_text()
    assert page.count("data:image/png") == 4  # two plots in two looks
    assert 'src="http' not in page
    assert "[3/3] third: round 3 of 3, 2 processes (about 1 s left)" in said
    with pytest.raises(BenchError, match="needs two GPUs"):  # asked for by name, it is an error
        run_parts(chosen[:1], BenchOptions())


def test_ctrl_c_leaves_the_parts_that_are_done(install: Install, tmp_path: Path) -> None:
    def interrupted(options: BenchOptions) -> PartResult:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("it goes on")

    chosen = [install("first", found("first")), install("second", interrupted), install("third", found("third"))]
    output = Output(tmp_path / "benchmark.md")
    report = run_parts(chosen, BenchOptions(rounds=3), output)
    assert report.interrupted
    assert [part.name for part in read_report(output.json).parts] == ["first"]
    assert "**Interrupted: only the parts below were done.**" in output.markdown.read_text()


def test_ctrl_c_within_the_rounds_keeps_those_that_are_whole(install: Install, tmp_path: Path) -> None:
    turns = iter(range(100))

    def turn() -> float:
        if next(turns) == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return 1.0

    def run(options: BenchOptions) -> PartResult:
        values = options.interleave({"1 process": turn, "2 processes": turn})
        return a_part(*[figure(variant, measured.values) for variant, measured in values.items()])

    output = Output(tmp_path / "benchmark.md")
    report = run_parts([install("only", run), install("later", run)], BenchOptions(rounds=9), output)
    assert report.interrupted
    assert len(report.parts) == 1
    assert report.parts[0].problem == "interrupted after 1 of 9 rounds"
    few = run_parts([install("few", found("few"))], BenchOptions(rounds=1))
    assert few.parts[0].notes == ["Too few rounds to conclude anything (1): raise --rounds."]
    assert "**Incomplete: interrupted after 1 of 9 rounds**" in output.markdown.read_text()


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("report.txt", "give the name of a Markdown file"),
        ("file/report.md", "cannot be written"),
        ("folder.md", "is a folder"),
        ("taken.md", "must be a folder for the plots"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_before_anything_runs(
    install: Install, tmp_path: Path, path: str, words: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "taken_plots").touch()
    (tmp_path / "folder.md").mkdir()

    def run(options: BenchOptions) -> PartResult:
        raise AssertionError("it ran")

    with pytest.raises(BenchError, match=words):
        run_parts([install("only", run)], BenchOptions(), Output(tmp_path / path))


def test_a_place_that_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    Output(tmp_path / "new" / "benchmark.md").check()
    assert not any((tmp_path / "new").iterdir())


def test_text_of_a_report_is_escaped_on_the_page(tmp_path: Path) -> None:
    part = a_part(figure("<script>alert(1)</script>", [1.0, 1.0, 1.0], x=1.0), notes=["<b>note</b>"])
    output = Output(tmp_path / "benchmark.md")
    output.write(a_report(part))
    page = output.html.read_text()
    assert not Reader(page).open
    assert "<script>" not in page
    assert "&lt;b&gt;note&lt;/b&gt;" in page


def test_the_list_names_every_part_and_a_wrong_name_the_nearest() -> None:
    shown = CliRunner().invoke(app, ["bench", "list"])
    assert [line.split()[0] for line in shown.output.splitlines()] == list(PARTS)
    with pytest.raises(ConfigError, match="did you mean scaling"):
        part_named("scalling")


def test_every_part_is_a_command_and_can_be_imported() -> None:
    for part in PARTS.values():
        assert callable(part.load())
        assert CliRunner().invoke(app, ["bench", part.name, "--help"]).exit_code == 0


@pytest.mark.parametrize("given", [["--gpus", "1", "2", "4"], ["--gpus", "1,2,4"], ["--gpus", "4,1", "2"]])
def test_gpus_with_spaces_or_commas(install: Install, given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[BenchOptions] = []

    def run(options: BenchOptions) -> PartResult:
        seen.append(options)
        return found("scaling")(options)

    install("scaling", run)
    words = ["bench", "scaling", *given, "training.batch_size=24", "--quick", "--strategy", "zero3"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert seen[0].processes == (1, 2, 4)
    assert seen[0].strategies == ("zero3",)
    assert seen[0].rounds == 3
    assert seen[0].config is not None
    assert seen[0].config.training.batch_size == 24
