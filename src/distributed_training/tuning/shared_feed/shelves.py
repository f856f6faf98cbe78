"""Which samples are there, and which make room for others.

Every sample is asked for under a key, which stands for (seed, epoch). A sample that drew nothing random is kept on the
lasting shelf: for all keys, for as long as the search goes on. Which ones are kept there first stay: every epoch goes
through all of them, so any part of them is as good as another, and to exchange them would only cost. Others are kept
under their key. Where room is needed, keys that nobody reads any more go first, those unused for longest before others,
and then samples that all readers of a key have had: what is left is a window that moves on with the slowest of them. A
part of the room is never given to lasting samples, so that there is a window even where these do not all fit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

import numpy as np

ABSENT, WORKING, ALONE = -1, -2, -3
"""In place of a slot: not here; being loaded; not to be had here, each trial loads it for itself."""
_WINDOW = 8  # one part of so many is kept from lasting samples


class _Page:
    """The samples of one key."""

    def __init__(self, samples: int) -> None:
        self.slots = np.full(samples, ABSENT, np.int32)
        self.had = np.zeros(samples, np.uint16)
        """How many readers have had each sample."""
        self.readers: set[Hashable] = set()


class Shelf:
    """The slots of one dataset. No threads: the service is its only user."""

    def __init__(self, samples: int, slots: int) -> None:
        self.samples, self.slots = samples, slots
        self._free = np.arange(slots - 1, -1, -1, dtype=np.int32)
        self._left = slots  # the first so many of `_free` are free
        self._lasting = np.full(samples, ABSENT, np.int32)
        self._most_lasting = slots if slots >= samples else slots - slots // _WINDOW
        self._pages: OrderedDict[int, _Page] = OrderedDict()
        self.lasting = 0
        """Samples on the lasting shelf."""

    @property
    def free(self) -> int:
        """Slots that nothing lies in."""
        return self._left

    def find(self, ids: np.ndarray, key: int) -> np.ndarray:
        """The slot of each sample, or why there is none."""
        found = self._lasting[ids]
        page = self._pages.get(key)
        if page is not None:
            self._pages.move_to_end(key)
            own = page.slots[ids]
            found = np.where((found < 0) & (own >= 0), own, found)
        return found

    def begin(self, ids: np.ndarray) -> None:
        """Somebody loads these samples now."""
        self._lasting[ids] = WORKING

    def finish(self, ids: np.ndarray, slots: np.ndarray, key: int, *, drew: bool) -> None:
        """They lie in these slots now."""
        if drew or self.lasting + len(ids) > self._most_lasting:
            self._lasting[ids] = ABSENT
            page = self._page(key)
            self.give_back(page.slots[ids][page.slots[ids] >= 0])
            page.slots[ids], page.had[ids] = slots, 0
        else:
            self._lasting[ids] = slots
            self.lasting += len(ids)

    def fail(self, ids: np.ndarray, *, forever: bool) -> None:
        """They could not be loaded; `forever`: nor will they be."""
        self._lasting[ids] = ALONE if forever else ABSENT

    def note(self, ids: np.ndarray, key: int) -> None:
        """A reader has had these samples."""
        page = self._pages.get(key)
        if page is not None:
            page.had[ids] += 1

    def read(self, reader: Hashable, key: int) -> None:
        """Somebody begins to read the samples of a key."""
        self._page(key).readers.add(reader)

    def unread(self, reader: Hashable, key: int) -> None:
        """They are done with it."""
        page = self._pages.get(key)
        if page is not None:
            page.readers.discard(reader)
            if not page.readers and not (page.slots >= 0).any():
                del self._pages[key]

    def allocate(self, count: int, held: np.ndarray) -> np.ndarray:
        """Up to so many slots, those of others if need be; none of the `held` ones, which are being read just now."""
        if self._left < count:
            self._make_room(count, held)
        count = min(count, self._left)
        self._left -= count
        return self._free[self._left : self._left + count].copy()

    def give_back(self, slots: np.ndarray) -> None:
        """Nothing lies in these slots any more."""
        self._free[self._left : self._left + len(slots)] = slots
        self._left += len(slots)

    def _page(self, key: int) -> _Page:
        page = self._pages.get(key)
        if page is None:
            page = self._pages[key] = _Page(self.samples)
        self._pages.move_to_end(key)
        return page

    def _make_room(self, count: int, held: np.ndarray) -> None:
        for unread in (True, False):
            for key in list(self._pages):  # the one that was used last is at the end
                page = self._pages[key]
                if bool(page.readers) == unread:
                    continue
                self._clear(page, page.slots >= 0 if unread else page.had >= len(page.readers), held)
                if unread and not (page.slots >= 0).any():
                    del self._pages[key]
                if self._left >= count:
                    return

    def _clear(self, page: _Page, which: np.ndarray, held: np.ndarray) -> None:
        ids = np.flatnonzero(which & (page.slots >= 0))
        if len(held):
            ids = ids[~np.isin(page.slots[ids], held)]
        self.give_back(page.slots[ids])
        page.slots[ids] = ABSENT
