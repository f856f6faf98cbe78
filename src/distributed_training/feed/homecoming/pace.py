"""How many bytes of files may be on their way: as many as fill the link, and hardly more, for leases wait behind them.

Two things are measured while a file comes. How fast chunks follow each other when they come without a pause is what the
link takes. How long it takes from granting credit to the chunk that it let through is what a grant is worth, be the way
long or the other direction full of batches. Their product fills the link without a queue. A bound on top, of what came
in the last second, keeps a wrong measure harmless.
"""

from __future__ import annotations

from collections import deque

from distributed_training.feed.homecoming.parcels import CHUNK

SMALLEST, LARGEST = 4 * CHUNK, 8 << 20
_MORE = 1.25
_RECENT = 32  # chunks
_ENOUGH = 4
_BOUND = 1.0  # seconds of what comes on average


class Pace:
    """Of one connection. Positions are counts of all bytes of files that came on it."""

    def __init__(self) -> None:
        self.size = SMALLEST
        """Bytes that may be on their way."""
        self._received = self._granted = 0
        self._grants: deque[tuple[int, int, float]] = deque()  # (from, to, when)
        self._gaps: deque[float] = deque(maxlen=_RECENT)
        self._arrivals: deque[tuple[float, int]] = deque()
        self._delay = 0.0
        self._last = 0.0

    def begin(self) -> None:
        """Another file begins; nothing is on its way. The link is empty now, so its delay shows."""
        self.size, self._delay, self._last = SMALLEST, 0.0, 0.0
        self._grants.clear()
        self._gaps.clear()
        self._arrivals.clear()

    def grant(self, now: float) -> int | None:
        """The position up to which the other side may send now; None while it stays as it is.

        It grows by two chunks or more: those that come together show how fast the link is.
        """
        limit = self._received + self.size
        if limit - self._granted < max(2 * CHUNK, self.size // 8):
            return None
        self._grants.append((self._granted, limit, now))
        self._granted = limit
        return limit

    def arrived(self, size: int, now: float) -> None:
        """A chunk came."""
        start, self._received = self._received, self._received + size
        while self._grants and self._grants[0][1] <= start:
            self._grants.popleft()
        if self._grants and self._grants[0][0] <= start:
            delay = max(now - self._grants[0][2], 1e-6)
            self._delay = min(self._delay or delay, delay)
        if self._last and size:
            self._gaps.append((now - self._last) / size)
        self._last = now
        self._arrivals.append((now, self._received))
        while now - self._arrivals[0][0] > _BOUND:
            self._arrivals.popleft()
        if len(self._gaps) >= _ENOUGH and self._delay:
            self._measure(now)

    def _measure(self, now: float) -> None:
        rate = 1.0 / max(sorted(self._gaps)[len(self._gaps) // 4], 1e-10)
        since, before = self._arrivals[0]
        average = (self._received - before) / max(now - since, 1e-6)
        self.size = int(min(max(min(_MORE * rate * self._delay, _BOUND * average), SMALLEST), LARGEST))
