"""`dtrain bench merge`: several reports of one machine as one."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.bench.reports import a_part, a_report, figure
from typer.testing import CliRunner

from distributed_training.bench.merging import merge_reports
from distributed_training.bench.records import read_report, to_json
from distributed_training.cli.main import app
from distributed_training.runtime.errors import BenchError


def test_cases_stand_side_by_side_and_the_later_takes_the_place_of_the_earlier(in_tmp: Path) -> None:
    early = a_report(
        a_part(
            figure("1 process", [90.0] * 3),
            figure("1 process", [10.0] * 3, case="strong"),
            command="first",
            problem="interrupted",
        )
    )
    late = a_report(a_part(figure("1 process", [100.0] * 3), command="second"), a_part(name="feed", title="Feed"))
    late.created = "2026-01-02T00:00:00Z"
    for name, report in (("early", early), ("late", late)):
        Path(f"{name}.json").write_text(to_json(report))
    words = ["bench", "merge", "late.json", "early.json", "--output", "both.md"]
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    merged = read_report(Path("both.json"))
    assert [part.name for part in merged.parts] == ["scaling", "feed"]
    found = {figure.case: figure.median for figure in merged.parts[0].figures}
    assert found == {"strong": 10.0, "weak scaling, mlp": 100.0}
    assert merged.created == late.created
    text = Path("both.md").read_text()
    assert "`first`  \n`second`" in text
    assert "**Incomplete: weak scaling, mlp, strong: interrupted**" in text
    assert Path("both_plots").is_dir()
    assert Path("both.html").exists()


def test_reports_of_two_machines_are_not_mixed() -> None:
    with pytest.raises(BenchError, match="a and b differ in machine: cores is 2 and 16"):
        merge_reports([("a", a_report()), ("b", a_report(cores=16))])
