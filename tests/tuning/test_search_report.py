"""The report of a search, from its two files to the page."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.bench.test_report import Reader
from tests.tuning.searches import make_search
from typer.testing import CliRunner

from distributed_training.cli.main import app
from distributed_training.runtime.errors import RunDirectoryError
from distributed_training.tuning.axes import axes_of, short_names, value_text
from distributed_training.tuning.records import Search, SearchFolder, Trial
from distributed_training.tuning.report import write_report

pytest.importorskip("matplotlib")
PIL = pytest.importorskip("PIL.Image")
PLOTS = {"history.png", "parallel.png", "importance.png", "slices.png", "curves.png"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> SearchFolder:
    """A search of two objectives with its report."""
    folder = tmp_path_factory.mktemp("searches") / "digits & co"
    found = make_search(folder, 30, {"val_accuracy": "max", "seconds": "min"})
    found.best_file.write_text("training:\n  lr: 0.1\n")
    result = CliRunner().invoke(app, ["report", str(folder)])
    assert result.exit_code == 0, result.output
    assert result.output.strip() == str(folder / "report" / "index.html")
    return found


def test_every_plot_is_a_real_image(place: SearchFolder) -> None:
    assert {path.name for path in place.report.iterdir()} == PLOTS | {"index.html", "pareto.png"}
    for name in PLOTS | {"pareto.png"}:
        with PIL.open(place.report / name) as image:
            image.load()
            assert image.width >= 1400
            assert len(set(image.convert("L").resize((64, 64)).getdata())) > 5, f"{name} is empty"


def test_the_page_holds_what_people_look_for(place: SearchFolder) -> None:
    page = (place.report / "index.html").read_text(encoding="utf-8")
    reader = Reader(page)
    assert reader.open == []
    for expected in (
        "digits & co", "completed", "best val_accuracy", "30 of 30", "stopped early", "1 failed", "12 min 34 s",
        "seed 0", "Pareto front", "training.momentum", "failed 2 times", "OutOfMemoryError: rank 0 ran out of memory",
        "loguniform", "dtrain train", "best.yaml", "epochs not trained",
    ):  # fmt: skip
        assert expected in reader.text, expected
    assert 'href="../trials/5/"' in page
    assert page.count("data:image/png") == 12  # six plots, light and dark
    assert "src=x" not in page


def test_a_report_can_be_made_at_any_time(tmp_path: Path) -> None:
    place = make_search(tmp_path / "going", 3)
    search = place.load()
    search.status, search.ended = "running", None
    place.save(search)
    place.append(Trial("4", {"training.lr": 0.1}, "running"))
    page = write_report(place)
    text = Reader(page.read_text(encoding="utf-8")).text
    assert "needs at least 10 trials" in text  # and says so instead of drawing chance
    assert not (place.report / "importance.png").exists()
    assert not (place.report / "pareto.png").exists()
    shutil.copytree(place.path, tmp_path / "elsewhere")
    assert write_report(tmp_path / "elsewhere").is_file()


@pytest.mark.parametrize("number", [0, 1])
def test_a_search_of_nothing_has_a_page_too(tmp_path: Path, number: int) -> None:
    place = SearchFolder(tmp_path)
    place.save(Search(name="none", status="failed", objectives={"val_loss": "min"}))
    if number:
        place.append(Trial("1", {"a": 1}, "failed", error="it's <b>broken</b>"))
    text = write_report(place).read_text(encoding="utf-8")
    assert "No trial has reported a figure" in text
    assert "<b>broken" not in text


def test_names_may_hold_anything(tmp_path: Path) -> None:
    evil = '<img src=x onerror="alert(1)">$\\frac'
    place = SearchFolder(tmp_path)
    place.save(Search(name=evil, objectives={evil: "min"}, space={evil: {"choice": [evil, "b"]}}))
    for n in range(10):
        drawn = {evil: [evil, "b"][n % 2], "n": n}
        place.append(Trial(f"{evil}{n}", drawn, "completed", {evil: n}, {evil: n}, [(1, n), (2, n)], directory=evil))
    page = write_report(place).read_text(encoding="utf-8")
    assert "<img src=x" not in page
    assert 'onerror="' not in page
    assert Reader(page).open == []


def test_a_folder_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    place = make_search(tmp_path, 2)
    place.report.write_text("a file where the folder should be")
    with pytest.raises(RunDirectoryError, match="cannot be written"):
        write_report(place)


def test_axes_know_their_ends_and_names(tmp_path: Path) -> None:
    place = make_search(tmp_path, 20)
    axes = {axis.label: axis for axis in axes_of(place.load(), place.trials())}
    assert list(axes) == ["lr", "batch_size", "optimizer", "momentum", "hidden"]
    assert axes["lr"].log
    assert axes["lr"].place(10**-2.5) == pytest.approx(0.5)
    assert [text for _, text in axes["lr"].ticks()] == ["0.0001", "0.001", "0.01", "0.1"]
    assert axes["batch_size"].names == ("32", "64", "128")
    assert axes["momentum"].place(None) is None
    assert all(0 <= place <= 1 for axis in axes.values() for place, _ in axis.ticks())
    assert [text for _, text in axes["hidden"].ticks()][:2] == ["20", "50"]


def test_names_are_as_short_as_they_can_be() -> None:
    assert short_names(["training.lr", "model.lr", "model.args.depth", "depth"]) == {
        "training.lr": "training.lr",
        "model.lr": "model.lr",
        "model.args.depth": "args.depth",
        "depth": "depth",
    }
    assert [value_text(v) for v in (True, None, [64, 64], 0.00012345, 12345.0, "sgd")] == [
        "true", "null", "[64, 64]", "0.0001234", "12,345", "sgd",
    ]  # fmt: skip
