"""The report of a run, from its folder to the page."""

from __future__ import annotations

import base64
import io
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.bench.test_history import metrics, start, write

from distributed_training.bench import write_report
from distributed_training.config import Config
from distributed_training.runtime.errors import RunDirectoryError
from distributed_training.runtime.run_directory import RunDirectory

pytest.importorskip("matplotlib")
PIL = pytest.importorskip("PIL.Image")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    path = tmp_path / "resnet18-cifar10"
    path.mkdir()
    Config().save(path / "config.yaml")
    trained = [
        metrics(s, train_loss=2 / s, lr=0.1 / s, samples_per_second=1200.0 + s, epoch=s / 10) for s in range(1, 31)
    ]
    validated = [metrics(10 * e, val_loss=0.4321 / e, val_accuracy=0.9 + e / 100, epoch=e) for e in (1, 2, 3)]
    end = {
        "event": "finish",
        "status": "completed",
        "val_loss": 0.14403,
        "seconds": 3725.0,
        "samples_per_second": 1215.5,
    }
    return write(path, start(host="gpu-1", parameters=11173962, gpu={"name": "H200"}), *trained, *validated, end)


class Reader(HTMLParser):
    """Checks that tags close in order, and collects the visible text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "img", "source"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data + " "


def test_the_files_are_there_and_real(run: RunDirectory) -> None:
    page = write_report(run)
    assert page == run.report / "index.html"
    names = {"index.html", "loss.png", "accuracy.png", "learning_rate.png", "throughput.png"}
    assert {path.name for path in run.report.iterdir()} == names
    for name in names - {"index.html"}:
        with PIL.open(run.report / name) as image:
            image.load()
            assert image.width >= 1000
            assert image.height >= 500


def test_the_page_holds_the_figures(run: RunDirectory) -> None:
    reader = Reader(write_report(run).read_text(encoding="utf-8"))
    assert reader.open == []
    for expected in (
        "resnet18-cifar10", "completed", "93.00%", "0.14403", "1 h 2 min", "11,173,962", "gpu.name", "H200",
        "batch_size: 64", "30 steps", "1970-01-01", "1,216",
    ):  # fmt: skip
        assert expected in reader.text, expected
    assert "details" in reader.tags


def test_the_page_needs_no_other_file(run: RunDirectory) -> None:
    page = write_report(run).read_text(encoding="utf-8")
    images = re.findall(r'(?:src|srcset)="data:image/png;base64,([^"]+)"', page)
    assert len(images) == page.count("src=") + page.count("srcset=") == 8  # four plots, light and dark
    for image in images:
        PIL.open(io.BytesIO(base64.b64decode(image))).verify()
    assert "http" not in re.sub(r'"data:[^"]+"', "", page)
    assert "prefers-color-scheme: dark" in page


def test_hostile_names_are_escaped(tmp_path: Path) -> None:
    path = tmp_path / "<script>alert(1)<"
    path.mkdir()
    evil = '<img src=x onerror="alert(1)">'
    (path / "config.yaml").write_text(f"model: '{evil}</pre>'\n")
    end = {"event": "finish", "status": evil, evil: 1.0}
    run = write(path, start(**{evil: evil}), metrics(1, **{evil: 1.0, "a&b": None}), metrics(2, **{evil: None}), end)
    page = write_report(run).read_text(encoding="utf-8")
    assert "<script" not in page
    assert "<img src=x" not in page
    assert 'onerror="' not in page
    assert page.count("</pre>") == 1
    assert Reader(page).open == []
    assert "a&amp;b 1 times" in page


def test_a_run_that_goes_on_has_a_report_too(tmp_path: Path) -> None:
    Config().save(tmp_path / "config.yaml")
    run = write(tmp_path, start(), metrics(10, train_loss=1.0), start(10), metrics(20, train_loss=0.5))
    text = Reader(write_report(run).read_text(encoding="utf-8")).text
    assert "running or killed" in text
    assert "resumed at step 10" in text
    first = (run.report / "loss.png").read_bytes()
    write(tmp_path, start(), metrics(10, train_loss=9.0), metrics(20, train_loss=1.0))
    write_report(run)  # again, over the first
    assert (run.report / "loss.png").read_bytes() != first


def test_a_run_without_metrics_or_config_has_a_page(tmp_path: Path) -> None:
    text = Reader(write_report(write(tmp_path, start())).read_text(encoding="utf-8")).text
    assert "no config.yaml" in text


def test_no_events_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="no events"):
        write_report(RunDirectory(tmp_path))
    assert not (tmp_path / "report").exists()


def test_a_report_that_cannot_be_written_says_so(run: RunDirectory) -> None:
    run.report.write_text("a file where the folder should be")
    with pytest.raises(RunDirectoryError, match="cannot be written"):
        write_report(run)
