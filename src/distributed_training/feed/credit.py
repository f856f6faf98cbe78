"""How many bytes each loader may send: sized from bandwidth and delay as measured, within one hard bound for all.

The bound is divided: half is for batches that wait for training, a quarter for what is on its way in every
connection's ordinary window, and a quarter for a single batch at a time that is larger than such a window. So no
loader can use up what another one needs to bring the step that training waits for.
"""

from __future__ import annotations

from distributed_training.runtime.errors import DataError

_SMALLEST = 64 << 10
_FIRST = 1 << 20  # bytes that may come before anything is measured
_FRAMES = 4  # frames that a window has room for, whatever the delay
_FORGET = 0.9


class Window:
    """One connection's window: as absolute positions in all payload ever sent on it."""

    def __init__(self) -> None:
        self.granted = 0
        self.received = 0
        self.blocked = 0
        """Size of the payload that waits for credit; 0 when none does."""
        self.exclusive = False
        """Whether this connection has the part of memory that is kept for a large batch."""
        self.largest = 0
        self.bandwidth = 0.0
        """Bytes a second while bytes were coming."""
        self.delay: float | None = None
        """Seconds there and back, the least seen."""

    @property
    def promised(self) -> int:
        """Bytes that may still come."""
        return self.granted - self.received

    def measured(self, size: int, seconds: float) -> None:
        """So many bytes came in so many seconds of uninterrupted arrival."""
        if seconds > 0:
            rate = size / seconds
            self.bandwidth = rate if rate > self.bandwidth else _FORGET * self.bandwidth + (1 - _FORGET) * rate

    def answered(self, seconds: float) -> None:
        """A ping came back."""
        self.delay = seconds if self.delay is None else min(seconds, 0.99 * self.delay + 0.01 * seconds)

    def target(self) -> int:
        """Bytes that should be allowed to be on their way: twice what the link holds, and some frames.

        Credit is renewed when half of it is used, and takes as long to get there as a byte. What is left then has to
        last that long, in whole frames.
        """
        link = 2 * self.bandwidth * (self.delay or 0.0)
        return max(_FIRST, int(link) + _FRAMES * self.largest)


class Credit:
    """The memory bound over all connections. Not safe for threads by itself: the hub's lock guards it."""

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.waiting = 0
        """Bytes of batches that arrived and wait for training."""
        self.windows: set[Window] = set()
        self._large: Window | None = None

    @property
    def held(self) -> int:
        """Bytes that are here or may come at any moment: never more than `memory`."""
        return self.waiting + sum(window.promised for window in self.windows)

    def join(self, window: Window) -> None:
        """A connection may begin to send."""
        self.windows.add(window)

    def leave(self, window: Window) -> None:
        """A connection is gone, and its promises with it."""
        self.windows.discard(window)
        if self._large is window:
            self._large = None

    def steps(self, size: int) -> int:
        """How many batches of this size may wait for training."""
        return max(1, self.memory // 2 // max(1, size))

    def crowded(self) -> bool:
        """Whether batches that wait take more than their half."""
        return self.waiting > self.memory // 2

    def arrived(self, window: Window, received: int) -> int:
        """All payload that came on a connection so far; how much that is since the last time."""
        size = received - window.received
        window.received = received
        window.largest = max(size, int(window.largest * 0.99))
        if size:  # payloads come in order: it was that one, or is not sent any more
            self.blocked(window, 0)
        return size

    def blocked(self, window: Window, size: int) -> None:
        """A connection has a payload of this size that waits for credit; 0 for none."""
        window.blocked = size
        if not size and self._large is window:
            self._large, window.exclusive = None, False

    def grant(self, window: Window) -> int | None:
        """The new limit to tell a connection; None while it stays as it is."""
        share = max(_SMALLEST, self.memory // 4 // max(1, len(self.windows)))
        target = min(window.target(), share)
        if window.blocked > window.promised:
            if window.blocked <= share:
                target = max(target, window.blocked)
            else:
                return self._grant_large(window)
        elif window.promised > target // 2:
            return None
        room = self.memory - self.held
        step = min(target - window.promised, room)
        if step <= 0 or (window.blocked and window.promised + step < window.blocked):
            return None
        window.granted += step
        return window.granted

    def _grant_large(self, window: Window) -> int | None:
        if window.blocked > self.memory // 4:
            raise DataError(
                f"one batch takes {window.blocked / 2**20:.1f} MiB, and the feed may hold {self.memory / 2**20:.1f} "
                f"MiB in all; raise its memory to at least {4 * window.blocked / 2**20:.0f} MiB, or make batches small"
            )
        if self._large is not None and self._large is not window:
            return None
        if window.blocked - window.promised > self.memory - self.held:
            return None
        self._large, window.exclusive = window, True
        window.granted = window.received + window.blocked
        return window.granted
