"""Python's search for garbage in cycles, kept short while it would cost much."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def old_objects_set_aside() -> Iterator[None]:
    """Inside, the search passes over all objects that exist now: the modules of torch alone are 300,000.

    A whole search takes 80 ms with them. How often one comes depends on how many objects live for some steps, such as
    batches that wait to be trained on: with those of a feed it was 13 us of every step. What becomes garbage meanwhile
    is found as ever if it is newer, else when this is over.
    """
    if gc.get_freeze_count():  # done already: by the user, or by a process that this one was forked from
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
