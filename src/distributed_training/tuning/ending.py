"""How trials leave a Ray worker: one that is ended gets the time for its last checkpoint, and none stands in the way.

Ray runs a trial in a thread of its worker, and uses the worker again for the next one. It asks a trial to end by
raising SystemExit where that reports, once. A thread that is still there after some seconds makes Ray 2.60 give up: the
*next* trial fails, is not tried again, and the search never ends, as it waits for that trial to start. So here a thread
is asked again and again, has a minute, and is then left to itself: what it reports after that is not heard.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from contextlib import suppress
from typing import Any
from weakref import WeakSet

logger = logging.getLogger(__name__)

SAVING = 60.0
"""Seconds that a trial which was ended has for its last checkpoint before it is left to itself."""
_AGAIN = 0.2  # seconds between two wishes that it end
_abandoned: WeakSet[threading.Thread] = WeakSet()


class EndsInPeace:
    """Put before Ray's class of trials."""

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Ray calls this when a worker gets another trial, and takes a False very badly."""
        from ray.train._internal.session import get_session

        session = get_session()
        if not end_thread(session, SAVING):
            _abandon(session)
        return bool(super().reset_config(new_config))  # type: ignore[misc]

    def cleanup(self) -> None:
        """Ray calls this when it is done with a worker, and would wait for nothing."""
        from ray.train._internal.session import get_session

        session = get_session()
        if session is not None:
            end_thread(session, SAVING)
        super().cleanup()  # type: ignore[misc]


def end_thread(session: Any, seconds: float) -> bool:
    """Ask the trial's thread to end until it has; whether it did in time."""
    thread, end = session.training_thread, time.monotonic() + seconds
    while thread.is_alive() and time.monotonic() < end:
        session.stop_event.set()
        session.continue_lock.release()
        with suppress(queue.Empty):  # a report of one that did not take the first wish as one: it must not block there
            session.result_queue.get_nowait()
        thread.join(timeout=_AGAIN)
    return not thread.is_alive()


def _abandon(session: Any) -> None:
    """Go on without the thread of the last trial, which does not end: Ray sees one that never began in its place."""
    thread = session.training_thread
    logger.warning("a trial that was ended has not left its worker after %g s, and is left to itself", SAVING)
    if not _abandoned:
        session.report = _deaf(session.report)
    _abandoned.add(thread)
    session.training_thread, session.training_started = threading.Thread(), False


def _deaf(report: Any) -> Any:
    """A session's `report` that hears nothing of threads which were left to themselves."""

    def heard(*arguments: Any, **more: Any) -> None:
        if threading.current_thread() in _abandoned:
            sys.exit(0)
        report(*arguments, **more)

    return heard
