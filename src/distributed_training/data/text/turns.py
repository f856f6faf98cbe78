"""One process of this machine at a time: the first one makes what the others find in the cache."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

_PATIENCE = 6 * 3600.0  # seconds; large corpora take hours to tokenise


@contextmanager
def in_turn(path: Path) -> Iterator[None]:
    """Hold the lock beside a path. Where another process has it too long, go on without: it costs work, not truth."""
    from filelock import FileLock, Timeout

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{path}.lock", timeout=_PATIENCE)
    try:
        lock.acquire()
    except Timeout:
        logger.warning("%s.lock is held for more than %g h by another process; going on without it", path, 6)
    try:
        yield
    finally:
        lock.release()
