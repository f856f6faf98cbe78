"""How fast a link takes what is sent: measured while something waits for it, be it for the socket or for credit.

What a socket takes at once is its buffer's doing, not the link's. So a measurement begins when something is left over
that could not be sent, and counts only what goes from then on.
"""

from __future__ import annotations

_WINDOW = 0.25  # seconds of one measurement
_SHORTEST, _LEAST = 0.02, 64 << 10  # a shorter or smaller one says nothing
_FORGET = 0.7


class LinkRate:
    """Bytes a second. Has no clock of its own."""

    def __init__(self) -> None:
        self.rate: float | None = None
        """None while nothing ever had to wait."""
        self._since: tuple[float, int] | None = None
        self._quiet: tuple[float, int] | None = None

    def note(self, now: float, sent: int, waits: bool) -> None:
        """So many bytes were sent so far, and `waits` says whether more is ready than may go."""
        if self._since is not None:
            seconds, size = now - self._since[0], sent - self._since[1]
            if seconds >= _WINDOW or not waits:
                if seconds >= _SHORTEST and size >= _LEAST:
                    rate = size / seconds
                    self.rate = rate if self.rate is None else _FORGET * self.rate + (1 - _FORGET) * rate
                    self._since = (now, sent) if waits else None
                elif not waits:
                    self._since = None
        elif waits:
            self._since, self._quiet = (now, sent), None
        else:
            self._could_be_more(now, sent)

    def _could_be_more(self, now: float, sent: int) -> None:
        """Nothing waits: the link is at least as fast as what it takes."""
        if self._quiet is None:
            self._quiet = (now, sent)
        elif (seconds := now - self._quiet[0]) >= 4 * _WINDOW:
            if self.rate is not None:
                self.rate = max(self.rate, (sent - self._quiet[1]) / seconds)
            self._quiet = (now, sent)
