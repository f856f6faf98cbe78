"""The report of a run: its plots as PNG files, and one HTML page that holds everything."""

from __future__ import annotations

from pathlib import Path

from distributed_training.bench.canvas import DARK, LIGHT
from distributed_training.bench.history import load_history
from distributed_training.bench.page import Image, render_page
from distributed_training.bench.plots import draw, families
from distributed_training.runtime.errors import RunDirectoryError
from distributed_training.runtime.run_directory import RunDirectory


def write_report(run: RunDirectory) -> Path:
    """Write RUN/report/: `index.html`, and `loss.png`, `accuracy.png`, ... for each family of metrics. Gives the page.

    Works on a finished run, on one that is still going, and on one that was killed.
    """
    history = load_history(run)
    images, plots = {}, families(history)
    for place, family in enumerate(plots):
        # On the page the first plot fills a row and the others stand in pairs; a last one left alone fills a row too.
        wide = place == 0 or (place == len(plots) - 1 and place % 2 == 1)
        light, dark = (draw(history, family, theme, wide) for theme in (LIGHT, DARK))
        images[family.file] = Image(family.title, light, dark)
    config = run.config_file.read_text(encoding="utf-8") if run.config_file.is_file() else "(no config.yaml)"
    page = run.report / "index.html"
    try:
        run.report.mkdir(parents=True, exist_ok=True)
        for file, image in images.items():
            (run.report / f"{file}.png").write_bytes(image.light)
        page.write_text(render_page(run.name, history, config, list(images.values())), encoding="utf-8")
    except OSError as error:
        raise RunDirectoryError(f"{run.report}: the report cannot be written ({error.strerror})") from None
    return page
