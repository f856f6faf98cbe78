"""`dtrain bench compare`: what became better or worse, beyond noise."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.bench.reports import a_part, a_report, figure
from typer.testing import CliRunner

from distributed_training.bench.comparing import compare_reports
from distributed_training.bench.figures import BenchReport
from distributed_training.bench.records import to_json
from distributed_training.cli.main import app
from distributed_training.runtime.errors import BenchError


def report(two: list[float], one: list[float] | None = None, **machine: object) -> BenchReport:
    """One process and two."""
    return a_report(a_part(figure("1 process", one or [100.0] * 5), figure("2 processes", two)), **machine)


QUIET = [190.0, 191.0, 189.0, 190.5, 189.5]


def test_a_slower_figure_is_a_regression_and_a_faster_one_an_improvement() -> None:
    slower = compare_reports(report(QUIET), report([value * 0.8 for value in QUIET]))
    assert [(c.of, c.after.variant, c.verdict) for c in slower.changes] == [
        ("value", "1 process", ""),
        ("ratio", "2 processes", "REGRESSION"),
        ("value", "2 processes", "REGRESSION"),
    ]
    assert "-20.0%" in slower.markdown()
    faster = compare_reports(report(QUIET), report([value * 1.2 for value in QUIET]))
    assert not faster.regressions
    assert "0 worse, 2 better" in faster.markdown()


def test_where_lower_is_better_more_is_a_regression() -> None:
    def memory(value: float) -> BenchReport:
        return a_report(a_part(figure("zero3", [value], quantity="memory", unit="MiB", better="lower")))

    assert compare_reports(memory(100.0), memory(120.0)).regressions
    assert not compare_reports(memory(120.0), memory(100.0)).regressions


def test_noise_is_no_regression() -> None:
    noisy = [190.0, 120.0, 230.0, 150.0, 260.0]
    changes = compare_reports(report(noisy), report([value * 0.8 for value in noisy]))
    assert not changes.regressions
    assert "too noisy to conclude" in changes.markdown()
    assert not compare_reports(report(QUIET), report([value * 0.97 for value in QUIET])).regressions  # below 5 %


def test_different_machines_are_said_and_only_ratios_compared() -> None:
    faster = report([value * 3 for value in QUIET], [300.0] * 5, cores=64)
    changes = compare_reports(report(QUIET), faster)
    assert changes.notes[0] == "DIFFERENT MACHINES: cores is 2 before and 64 after"
    assert [(c.of, c.verdict) for c in changes.changes] == [("ratio", "")]


def test_reports_of_other_parts_have_nothing_to_compare() -> None:
    other = a_report(a_part(figure("fp32", [1.0], part="precision"), name="precision"))
    with pytest.raises(BenchError, match=r"no figure in common \(parts: scaling and precision\)"):
        compare_reports(report(QUIET), other)


def test_the_command_fails_only_if_asked_to(tmp_path: Path) -> None:
    before, after, table = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "changes.md"
    before.write_text(to_json(report(QUIET)))
    after.write_text(to_json(report([value * 0.5 for value in QUIET])))
    command = ["bench", "compare", str(before), str(after)]
    shown = CliRunner().invoke(app, [*command, "--output", str(table)])
    assert shown.exit_code == 0
    assert "REGRESSION" in shown.output
    assert table.read_text() == shown.output
    assert CliRunner().invoke(app, [*command, "--fail"]).exit_code == 1
    assert CliRunner().invoke(app, [*command[:2], str(before), str(before), "--fail"]).exit_code == 0
