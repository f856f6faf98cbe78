"""What a search leaves for its user: the best settings as a file, and a report."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distributed_training.config import Config
from distributed_training.runtime.errors import MissingDependencyError, SearchError
from distributed_training.tuning.best import write_best
from distributed_training.tuning.records import SearchFolder, Trial
from distributed_training.tuning.standings import best_trial

logger = logging.getLogger(__name__)


def finish(folder: SearchFolder, base: Config | Mapping[str, Any]) -> tuple[Trial | None, Path | None]:
    """Write best.yaml and the report; gives the best trial and the report's page, None where there is none."""
    from distributed_training.tuning.report import write_report

    search, trials = folder.load(), folder.trials()
    best = best_trial(search, trials)
    if best is not None:
        value = best.value(search.metric)
        note = f"The best of {len(trials)} trials of {search.name}: trial {best.id}, {search.metric} {value}"
        write_best(folder.path, base, best.parameters, note)
    try:
        return best, write_report(folder.path)
    except MissingDependencyError as error:
        logger.warning("no report: %s", error)
        return best, None


def best_result(analysis: Any, metric: str | None = None, mode: str | None = None) -> Any:
    """The best of Ray's results: each counts with its best report, and failed ones do not."""
    try:
        return analysis.get_best_result(metric, mode, scope="all")
    except (RuntimeError, ValueError) as error:
        raise SearchError(f"no best trial: {' '.join(str(error).split())}") from None
