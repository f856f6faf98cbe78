"""Python's search for garbage in cycles, kept short while it would cost much."""

from __future__ import annotations

import gc
import time

_SOON = 1.0  # seconds: what is over sooner does not need it


class OldObjects:
    """All objects that there were before a long work began: 300,000 of torch's modules alone.

    A whole search goes through them in 150 ms. How often one comes depends on how many objects live for some steps,
    such as batches that wait to be trained on: with those of a feed, one in 6,000 steps. Once they are set aside, the
    search passes over them, until the context ends. What is newer is found as ever.
    """

    def __init__(self) -> None:
        self._due: float | None = None
        self._frozen = False

    def __enter__(self) -> OldObjects:
        self._due = time.monotonic() + _SOON
        return self

    def set_aside(self) -> None:
        """Once the work has gone on for a while, search for the last time, and set aside what is left.

        For objects that were set aside already, by the user or by the process that this one was forked from, there is
        nothing to do: nobody could tell them from ours at the end.
        """
        if self._due is None or time.monotonic() < self._due:
            return
        self._due = None
        if not gc.get_freeze_count():
            gc.collect()
            gc.freeze()
            self._frozen = True

    def __exit__(self, *_: object) -> None:
        self._due = None
        if self._frozen:
            gc.unfreeze()
            self._frozen = False
