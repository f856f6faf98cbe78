"""The report of a search: its plots as PNG files, and one HTML page that holds everything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from distributed_training.bench.canvas import DARK, LIGHT, Theme
from distributed_training.bench.page import Image
from distributed_training.runtime.errors import RunDirectoryError
from distributed_training.tuning.axes import axes_of
from distributed_training.tuning.importance import importance
from distributed_training.tuning.page import render_page
from distributed_training.tuning.parallel import draw_parallel
from distributed_training.tuning.plots import draw_curves, draw_history, draw_importance
from distributed_training.tuning.records import SearchFolder
from distributed_training.tuning.relations import draw_pareto, draw_slices


def write_report(folder: str | Path | SearchFolder) -> Path:
    """Write FOLDER/report/: `index.html`, and `history.png`, `parallel.png`, `importance.png`, ... Gives the page.

    Reads nothing but the records of the search. Works on one that is finished, still going, or was killed. A plot for
    which there is too little is left out.
    """
    place = folder if isinstance(folder, SearchFolder) else SearchFolder(Path(folder))
    search, trials = place.load(), place.trials()
    found = importance(search, trials)
    axes = axes_of(search, trials)
    plots: dict[str, tuple[str, Callable[[Theme], bytes | None]]] = {
        "history": ("History of the search", lambda theme: draw_history(search, trials, theme)),
        "pareto": ("Pareto front", lambda theme: draw_pareto(search, trials, theme)),
        "parallel": ("Parallel coordinates of all trials", lambda theme: draw_parallel(search, trials, theme)),
        "importance": ("Importance of each parameter", lambda t: draw_importance(found, axes, search.metric, t)),
        "slices": ("Each parameter against the objective", lambda theme: draw_slices(search, trials, theme)),
        "curves": ("Curves of all trials", lambda theme: draw_curves(search, trials, theme)),
    }
    images: dict[str, Image] = {}
    for name, (title, draw) in plots.items():
        light, dark = draw(LIGHT), draw(DARK)
        if light is not None and dark is not None:
            images[name] = Image(title, light, dark, over="")
    page = place.report / "index.html"
    try:
        place.report.mkdir(parents=True, exist_ok=True)
        for name in plots:
            file = place.report / f"{name}.png"
            if name in images:
                file.write_bytes(images[name].light)
            else:
                file.unlink(missing_ok=True)  # of an earlier report
        page.write_text(render_page(place, search, trials, found, list(images.values())), encoding="utf-8")
    except OSError as error:
        raise RunDirectoryError(f"{place.report}: the report cannot be written ({error.strerror})") from None
    return page
