"""Several trackers as one. A tracker that breaks is left out; neither the others nor the training notice."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from distributed_training.tracking.base import RunInfo, Tracker

logger = logging.getLogger(__name__)


class Trackers(Tracker):
    """Passes every call on to each of its trackers, and drops those that raise."""

    def __init__(self, trackers: Iterable[Tracker]) -> None:
        self.active = list(trackers)
        """Those that still receive metrics."""
        self._broken: list[Tracker] = []

    def start(self, run: RunInfo) -> None:
        """Start each tracker. One that cannot start has to clean up after itself: it hears nothing more."""
        self._each(lambda tracker: tracker.start(run))
        self._broken.clear()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._each(lambda tracker: tracker.log(metrics, step))

    def checkpoint(self, path: Path, step: int, metrics: Mapping[str, float]) -> None:
        self._each(lambda tracker: tracker.checkpoint(path, step, metrics))

    def finish(self, status: str, summary: Mapping[str, float]) -> None:
        """Finish each tracker; also those that broke on the way, which still hold files, threads or processes."""
        broken, self._broken = self._broken, []
        self._each(lambda tracker: tracker.finish(status, summary))
        for tracker in broken:
            try:
                tracker.finish(status, summary)
            except Exception as error:  # it was reported when it broke
                logger.debug("%s: finish failed too: %s", type(tracker).__name__, error)
        self.active = []

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for tracker in list(self.active):
            try:
                call(tracker)
            except Exception as error:
                self.active.remove(tracker)
                self._broken.append(tracker)
                logger.warning(
                    "%s: %s: %s; left out from now on; training goes on",
                    type(tracker).__name__,
                    type(error).__name__,
                    " ".join(str(error).split()) or "no message",
                )
