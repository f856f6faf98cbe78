"""Figures, their comparisons, and the JSON they are kept in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.bench.reports import a_part, a_report, figure

from distributed_training.bench.measure import Comparison, margin_of, turns
from distributed_training.bench.records import read_report, to_json, write_file
from distributed_training.bench.tables import tables, too_noisy
from distributed_training.runtime.errors import BenchError


def test_a_ratio_is_that_of_single_rounds_so_that_drift_cancels() -> None:
    part = a_part(figure("1 process", [100.0, 50.0, 25.0]), figure("2 processes", [190.0, 95.0, 47.5]))
    found = part.comparison(part.figures[1])
    assert found is not None
    assert found.median == pytest.approx(1.9)
    assert found.spread == 0.0
    assert found.words == ""
    assert part.figures[1].noisy  # the machine drifted; the comparison did not suffer
    assert part.comparison(part.figures[0]) is None


@pytest.mark.parametrize(
    ("ratios", "words"),
    [
        ([1.5, 1.49, 1.51, 1.5, 1.5], ""),
        ([1.001, 0.999, 1.0, 1.0005, 0.9995], "no difference beyond noise"),
        ([0.8, 1.2, 1.0, 1.3, 0.7], "too noisy to conclude: spread 0.40; close other programs or raise --rounds"),
        ([2.0, 2.0], "too few rounds to conclude (2): raise --rounds"),
    ],
)
def test_a_comparison_says_what_can_be_concluded(ratios: list[float], words: str) -> None:
    assert Comparison(ratios).words == words


def test_more_rounds_of_the_same_noise_allow_a_conclusion() -> None:
    noise = [1.02, 1.10, 1.18, 1.06, 1.14]
    assert Comparison(noise).too_noisy
    assert Comparison(noise * 12).differs
    assert margin_of(noise * 12) < margin_of(noise)


def test_the_report_says_in_words_that_it_is_too_noisy() -> None:
    noisy = figure("2 processes", [100.0, 130.0, 80.0, 70.0, 120.0])
    part = a_part(figure("1 process", [100.0] * 5), noisy)
    assert "1 of 1 comparisons are too noisy to conclude" in too_noisy(part)
    (table,) = tables(part)
    assert table.head == ("variant", "to 1 process", "median, samples/s", "spread", "what can be said")
    assert table.rows[1][-1].startswith("too noisy to conclude: spread")
    quiet = a_part(figure("1 process", [100.0] * 5), figure("2 processes", [190.0] * 5))
    assert too_noisy(quiet) == ""


def test_ctrl_c_keeps_the_rounds_that_are_whole() -> None:
    answers = iter([1, 2, 3, 4, 5, 6, 7])  # a warm-up round, two whole rounds, half of a third

    def turn() -> int:
        number = next(answers, None)
        if number is None:
            raise KeyboardInterrupt
        return number

    whole: list[int] = []
    found = turns({"a": turn, "b": turn}, rounds=9, warmup=1, stopped=whole.append)
    assert whole == [2]
    assert found == {"a": [4, 5], "b": [3, 6]}
    with pytest.raises(KeyboardInterrupt):  # not one whole round
        turns({"a": turn}, rounds=9, warmup=1, stopped=whole.append)


def test_a_report_survives_its_json(tmp_path: Path) -> None:
    report = a_report(a_part(figure("1 process", [100.0, 101.0, 99.0]), figure("2 processes", [190.0, 191.0, 189.0])))
    file = tmp_path / "reports" / "benchmark.json"
    write_file(file, to_json(report))
    read = read_report(file)
    assert read.parts[0].figures == report.parts[0].figures
    assert (read.machine, read.versions, read.created) == (report.machine, report.versions, report.created)
    assert [path.name for path in file.parent.iterdir()] == ["benchmark.json"]
    body = json.loads(file.read_text())
    assert body["format"] == 1
    assert body["parts"][0]["figures"][1]["ratio"] == pytest.approx(1.9, rel=0.01)


def _damaged(change: Any) -> str:
    body = json.loads(to_json(a_report(a_part(figure("1 process", [1.0])))))
    change(body)
    return json.dumps(body)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "no JSON"),
        ("[1, 2]", "no report of dtrain bench"),
        ('{"metric": 3}', "no report of dtrain bench"),
        (_damaged(lambda body: body.update(format=99)), "written in format 99, and this version reads 1"),
        (_damaged(lambda body: body.pop("machine")), "damaged"),
        (_damaged(lambda body: body["parts"][0]["figures"][0].update(values=[])), "has no values"),
        (_damaged(lambda body: body["parts"][0]["figures"][0].update(values="many")), "damaged"),
        (_damaged(lambda body: body["parts"][0]["figures"][0].update(better="faster")), "no direction"),
        ("[" * 100_000, "no JSON"),
    ],
)
def test_a_file_that_is_no_report_is_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(BenchError, match=words) as error:
        read_report(file)
    assert str(error.value).startswith(str(file))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"none\.json: cannot be read"):
        read_report(tmp_path / "none.json")
