"""Bytes that are sent only to see how fast they arrive. The same code measures on both sides of a connection.

Whoever sends counts its probes by slices of time: all of one slice carry the same number. Whoever receives sees the
number change, and then knows how many bytes came and how long they took. How much is sent is for the receiver to
say, by credit: it begins small and grows as fast as bytes come, so that a slow link is not filled for minutes.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from distributed_training.wire import Connection, Probe
from distributed_training.wire.messages import ProbeReport

if TYPE_CHECKING:
    from distributed_training.feed.channel import Channel
    from distributed_training.wire.events import Event

LONGEST_PIECE = 1 << 20
"""Bytes of the largest probe."""
_SHORTEST_PIECE = 16 << 10
_SLICE = 0.2  # seconds
_PIECE_SECONDS = 0.01  # what one probe should take on its way
_AT_ONCE = 2 << 20  # bytes handed over before looking at what came
_FIRST_WINDOW, _LARGEST_WINDOW = 256 << 10, 64 << 20
_QUICK = 0.5  # seconds: a window whose half came sooner is doubled
_HEARD = 16


class Talk:
    """A connection driven by one thread, turn by turn."""

    def __init__(self, channel: Channel, connection: Connection) -> None:
        self.channel, self.connection = channel, connection
        self.first = b""
        """The first bytes that the peer ever sent: they tell what it is if it is not one of us."""

    def turn(self, deadline: float, *, more: bool = False) -> list[Event]:
        """Send what is due and take what came. Waits until then if there is nothing; but where the caller has `more` to
        send, only until there is room for it. OSError, PeerError."""
        channel, connection = self.channel, self.connection
        channel.queue(connection.data_to_send())
        channel.flush()
        buffer = connection.get_buffer()
        size = channel.receive_into(buffer)
        if size is None:
            room = not channel.pending and connection.sending.available > 0
            channel.wait(0.0 if more and room else deadline - time.monotonic())
            return []
        if size == 0:
            connection.receive_eof()
        else:
            if len(self.first) < _HEARD:
                self.first += bytes(buffer[: min(size, _HEARD - len(self.first))])
            connection.buffer_updated(size)
        return list(connection.events())


class ProbeSender:
    """Sends probes for as long as the other side gives credit."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._bytes = memoryview(os.urandom(LONGEST_PIECE))  # a tunnel that compresses gains nothing
        self._piece = _SHORTEST_PIECE
        self._number = 0
        self._since, self._sent = 0.0, 0

    def fill(self) -> None:
        """Queue some probes, as credit allows. To be called when what was queued before is gone."""
        connection, end = self._connection, self._connection.sending.sent + _AT_ONCE
        while connection.sending.sent < end and connection.sending.available:
            size = min(self._piece, connection.sending.available)
            self._count(size)
            connection.send_probe(self._number, self._bytes[:size])

    def end(self) -> int:
        """Say that this was all; the number of the last slice."""
        last = self._number
        self._number += 1
        self._connection.send_probe(self._number, b"")
        self._since = 0.0
        return last

    def _count(self, size: int) -> None:
        now = time.monotonic()
        if not self._since:
            self._since, self._sent = now, 0
        elif now - self._since >= _SLICE:
            rate = self._sent / (now - self._since)
            self._piece = min(LONGEST_PIECE, max(_SHORTEST_PIECE, int(rate * _PIECE_SECONDS)))
            self._number += 1
            self._since, self._sent = now, 0
        self._sent += size


class ProbeMeter:
    """What arrives of probes: how fast it came, and how much more may come."""

    def __init__(self, most: int) -> None:
        """`most` bytes may come in all."""
        self._most = most
        self._window = _FIRST_WINDOW
        self._granted = self._received = 0
        self._granted_at = 0.0
        self._number: int | None = None
        self._size = 0
        self._since = self._last = 0.0

    @property
    def outstanding(self) -> int:
        """Bytes that may still come."""
        return self._granted - self._received

    def credit(self, now: float) -> int | None:
        """The limit to tell the sender now; None while it has enough."""
        if self._granted and self.outstanding > self._window // 2:
            return None
        if self._granted and now - self._granted_at < _QUICK:
            self._window = min(_LARGEST_WINDOW, 2 * self._window)
        limit = min(self._most, self._received + self._window)
        if limit <= self._granted:
            return None
        self._granted, self._granted_at = limit, now
        return limit

    def arrived(self, probe: Probe, now: float) -> ProbeReport | None:
        """Count a probe; what came before it, where it begins another slice."""
        report = None
        self._received += probe.size
        if self._number is None:
            self._since, self._size = now, -probe.size  # nobody knows when the first one set out
        elif probe.number != self._number:
            report = self.unfinished()
            self._since, self._size = self._last, 0  # a slice begins where the one before ended
        self._number = probe.number if probe.size else None  # an empty one is the end
        self._size += probe.size
        self._last = now
        return report

    def unfinished(self) -> ProbeReport:
        """The slice that is arriving."""
        return ProbeReport(self._number or 0, self._size, max(0.0, self._last - self._since))


def rate_of(reports: Sequence[ProbeReport]) -> float:
    """Bytes a second of some slices; a connection begins slowly, so only the second half of them counts."""
    later = [report for report in reports if report.seconds > 0 and report.size > 0]
    later = later[len(later) // 2 :]
    return statistics.median([report.size / report.seconds for report in later]) if later else 0.0
