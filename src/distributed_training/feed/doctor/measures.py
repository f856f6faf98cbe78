"""What a doctor measures once it is welcome: clocks, round trip, bandwidth each way."""

from __future__ import annotations

import statistics
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distributed_training.feed.doctor.probing import ProbeMeter, ProbeSender
from distributed_training.feed.doctor.report import FaultError
from distributed_training.wire import Lost, PeerError, Probe, Reason
from distributed_training.wire.messages import Credit, Error, Goodbye, Ping, Pong, ProbeReport

if TYPE_CHECKING:
    from distributed_training.feed.doctor.way import Visit
    from distributed_training.wire.events import Event

_LEAVING = 2.0  # seconds that the other side has to say goodbye


@dataclass(frozen=True)
class RoundTrip:
    """Pings that came back."""

    shortest: float
    """Seconds."""
    median: float
    clock: float
    """Seconds that the clock there is ahead of the one here."""
    uncertain: float
    """By how much that may be wrong."""


class Measures:
    """One visit's measurements. Each ends by its deadline, with a FaultError where the other side is gone."""

    def __init__(self, visit: Visit, timeout: float) -> None:
        self._talk, self._timeout = visit.talk, timeout
        self._reports: list[ProbeReport] = []
        self._pong: Pong | None = None
        self._meter: ProbeMeter | None = None
        self._back: list[ProbeReport] = []

    def round_trip(self, count: int = 20) -> RoundTrip:
        """Ping the other side so many times, one after the other."""
        trips: list[tuple[float, float]] = []
        deadline = time.monotonic() + self._timeout
        for number in range(1, count + 1):
            self._pong = None
            before, clock = time.monotonic(), time.time()
            self._talk.connection.send(Ping(number, time.monotonic_ns()))
            while self._pong is None or self._pong.number != number:
                self._turn(deadline, "a ping")
            took = time.monotonic() - before
            trips.append((took, self._pong.here / 1e9 - (clock + took / 2)))
        shortest, ahead = min(trips)  # the quickest one says most about the clocks
        return RoundTrip(shortest, statistics.median(took for took, _ in trips), ahead, shortest / 2)

    def there(self, seconds: float) -> list[ProbeReport]:
        """What arrived on the other side of probes from here, slice by slice."""
        self._reports.clear()
        sender, begin = ProbeSender(self._talk.connection), time.monotonic()
        deadline = begin + seconds + self._timeout
        while time.monotonic() < begin + seconds:
            if not self._talk.channel.pending:
                sender.fill()
            self._turn(deadline, "credit", begin + seconds, more=True)
        last = sender.end()
        while not self._reports or self._reports[-1].number < last:
            self._turn(deadline, "a report of what arrived")
        return list(self._reports)

    def back(self, seconds: float, most: int) -> list[ProbeReport]:
        """The same from there to here. The other side sends for as long as it has credit, `most` bytes in all."""
        self._back.clear()
        meter = self._meter = ProbeMeter(most)
        connection, begin = self._talk.connection, time.monotonic()
        deadline = begin + seconds + self._timeout
        try:
            while (now := time.monotonic()) < begin + seconds or meter.outstanding:
                if now < begin + seconds and (limit := meter.credit(now)) is not None:
                    connection.send_credit(limit)
                if not meter.outstanding:
                    break  # all that it may send has come
                self._turn(deadline, "probes")
        finally:
            self._meter = None
        return [*self._back, meter.unfinished()]

    def leave(self) -> None:
        """Say goodbye; an answer is not needed."""
        connection, deadline = self._talk.connection, time.monotonic() + _LEAVING
        connection.send(Goodbye(Reason.DONE, ""))
        with suppress(OSError, PeerError):
            while not connection.closed and time.monotonic() < deadline:
                self._talk.turn(deadline)

    # -- one turn

    def _turn(self, deadline: float, what: str, until: float | None = None, *, more: bool = False) -> None:
        """Hear what comes, until then; the deadline is for the whole measurement."""
        if time.monotonic() > deadline:
            raise FaultError(
                "measuring",
                f"{self._talk.channel.peer} is connected, but {what} did not come within {self._timeout:g} s",
                "the link or the GPU side is overloaded; try again, or with a longer --timeout",
            )
        try:
            events = self._talk.turn(deadline if until is None else until, more=more)
        except (OSError, PeerError) as error:
            raise self._broken(str(error)) from None
        for event in events:
            self._event(event)

    def _event(self, event: Event) -> None:
        now = time.monotonic()
        if isinstance(event, Probe) and self._meter is not None:
            if (report := self._meter.arrived(event, now)) is not None:
                self._back.append(report)
        elif isinstance(event, Pong):
            self._pong = event
        elif isinstance(event, ProbeReport):
            self._reports.append(event)
        elif isinstance(event, Ping):
            self._talk.connection.send(Pong(event.number, event.clock, time.time_ns()))
        elif isinstance(event, (Goodbye, Error)):
            raise self._broken(event.text or "it is closing")
        elif isinstance(event, Lost):
            raise self._broken("the connection broke")
        else:
            assert isinstance(event, (Credit, Probe)), event  # credit is counted by the connection itself

    def _broken(self, why: str) -> FaultError:
        return FaultError(
            "measuring",
            f"{self._talk.channel.peer} was lost in the middle: {why}",
            "see whether the GPU side still runs; if it does, the network between is not stable (Wi-Fi, VPN)",
        )
