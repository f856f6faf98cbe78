"""Where a benchmark goes: Markdown, JSON beside it, PNG plots in a folder, and one HTML page."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path

from distributed_training.bench.canvas import DARK, LIGHT
from distributed_training.bench.drawing import draw_plot
from distributed_training.bench.figures import BenchReport
from distributed_training.bench.markdown import to_markdown
from distributed_training.bench.page import Image
from distributed_training.bench.records import to_json, write_file
from distributed_training.bench.suite_page import to_html
from distributed_training.runtime.errors import BenchError, MissingDependencyError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Output:
    """The files of one report, all named after its Markdown file."""

    markdown: Path

    @property
    def json(self) -> Path:
        """For programs, and for `dtrain bench compare`."""
        return self.markdown.with_suffix(".json")

    @property
    def html(self) -> Path:
        """One page with everything in it."""
        return self.markdown.with_suffix(".html")

    @property
    def plots(self) -> Path:
        """The folder of images that the Markdown shows."""
        return self.markdown.with_name(f"{self.markdown.stem}_plots")

    def check(self) -> None:
        """Refuse a place that cannot be written, before hours are spent."""
        if self.markdown.suffix.lower() not in (".md", ".markdown"):
            raise BenchError(
                f"--output {self.markdown}: give the name of a Markdown file, such as reports/benchmark.md; the JSON, "
                "the page and the plots are named after it"
            )
        for path in (self.markdown, self.json, self.html):
            if path.is_dir():
                raise BenchError(f"--output {self.markdown}: {path} is a folder; give another name")
        if self.plots.exists() and not self.plots.is_dir():
            raise BenchError(f"--output {self.markdown}: {self.plots} must be a folder for the plots, and is a file")
        probe = self.plots / ".probe"
        try:
            write_file(probe, b"")
        except BenchError as error:
            raise BenchError(f"--output {error}; choose a place that you may write to") from None
        probe.unlink()
        if not any(self.plots.iterdir()):
            self.plots.rmdir()

    def write(self, report: BenchReport) -> list[Path]:
        """Write all of it; gives the files. Without matplotlib there are no plots, and the report says so."""
        images: dict[str, list[Image]] = {}
        links: dict[str, list[tuple[str, str]]] = {}
        files: list[Path] = []
        try:
            for part in report.parts:
                for plot in part.plots:
                    light, dark = (draw_plot(part, plot, theme) for theme in (LIGHT, DARK))
                    if light is None or dark is None:
                        continue
                    file = self.plots / f"{part.name}_{_file_name(plot.title)}.png"
                    write_file(file, light)
                    files.append(file)
                    images.setdefault(part.name, []).append(Image(plot.title, light, dark, ""))
                    links.setdefault(part.name, []).append((plot.title, f"{self.plots.name}/{file.name}"))
        except MissingDependencyError as error:
            logger.warning("no plots: %s", error)
        write_file(self.json, to_json(report))
        write_file(self.html, to_html(report, images))
        write_file(self.markdown, to_markdown(report, links))
        return [self.markdown, self.json, self.html, *files]


def _file_name(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", title.lower()).strip("_")[:60] or "plot"
