"""Forking a process that has lived for a while."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def garbage_stays_here() -> Iterator[None]:
    """A child forked inside does not collect the garbage of this process.

    Some of it belongs to threads and devices that the child does not have: a process group or a store whose last
    reference is freed there joins a thread that is not, and the child aborts. It also keeps shared pages shared.
    """
    before = gc.get_freeze_count()
    gc.freeze()
    try:
        yield
    finally:
        if not before:  # else whoever set objects aside wants them to stay there
            gc.unfreeze()
