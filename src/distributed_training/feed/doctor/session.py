"""The GPU side of a doctor's visit: takes probes and says how fast they came, sends probes while it has credit.

A doctor gets no lease and no batch, so training notices nothing of it but bytes on the link, and of these there are few
while loaders are connected. A visit is short, and only a few are allowed at a time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from distributed_training._version import __version__
from distributed_training.data.plan import PLAN_VERSION
from distributed_training.feed.doctor.probing import LONGEST_PIECE, ProbeMeter, ProbeSender
from distributed_training.feed.guests import Guest
from distributed_training.runtime.errors import FeedError
from distributed_training.wire import Probe, Reason
from distributed_training.wire.messages import Join, Refused, Welcome

if TYPE_CHECKING:
    from distributed_training.feed.session import Session
    from distributed_training.wire.events import Event
    from distributed_training.wire.fields import Fact

logger = logging.getLogger(__name__)

_VISIT = 180.0  # seconds that a visit may take
_AT_A_TIME = 4
_MOST, _MOST_BESIDE_LOADERS = 8 << 30, 256 << 20  # bytes of probes each way
_LATER = 1.0  # seconds after which a visit's time is looked at


class Doctors:
    """What all doctors that visit one server are told, and how many of them are there. Any thread may call it."""

    def __init__(self, purpose: str, loaders: Callable[[], int] = lambda: 0) -> None:
        """`purpose` says what the server is there for; `loaders` how many loader workers are connected."""
        self.purpose, self.loaders = purpose, loaders
        self._there = 0
        self._lock = threading.Lock()

    def guest(self, session: Session) -> Guest:
        """One of them."""
        return DoctorGuest(session, self)

    def enter(self) -> bool:
        """Count one more; False where there are enough."""
        with self._lock:
            room = self._there < _AT_A_TIME
            self._there += room
            return room

    def leave(self) -> None:
        """Count one less."""
        with self._lock:
            self._there -= 1


class DoctorGuest(Guest):
    """One doctor."""

    def __init__(self, session: Session, doctors: Doctors) -> None:
        super().__init__(session)
        self._doctors, self._inside = doctors, False
        self._end = time.monotonic() + _VISIT
        self._most = 0
        self._meter: ProbeMeter | None = None
        self._sender: ProbeSender | None = None

    def admit(self, join: Join) -> Welcome | Refused:
        self._inside = self._doctors.enter()
        if not self._inside:
            return Refused(Reason.BUSY, f"{_AT_A_TIME} doctors are here already")
        loaders = self._doctors.loaders()
        self._most = _MOST_BESIDE_LOADERS if loaders else _MOST
        self._meter, self._sender = ProbeMeter(self._most), ProbeSender(self.session.connection)
        logger.info("%s looks at the way from %s", self.session.name, self.session.peer)
        facts: dict[str, Fact] = {
            "plan": PLAN_VERSION, "purpose": self._doctors.purpose, "loaders": loaders, "probe_bytes": self._most,
        }  # fmt: skip
        return Welcome(self.session.name, __version__, facts, (), False, LONGEST_PIECE)

    def hear(self, event: Event) -> None:
        if isinstance(event, Probe):
            assert self._meter is not None
            report = self._meter.arrived(event, time.monotonic())
            if report is not None and not self.session.leaving:
                self.session.connection.send(report)

    def speak(self, now: float) -> None:
        connection = self.session.connection
        assert self._meter is not None
        assert self._sender is not None
        if now > self._end:
            raise FeedError(f"a doctor's visit may take {_VISIT:g} s")
        if (limit := self._meter.credit(now)) is not None:
            connection.send_credit(limit)
        if connection.sending.limit > self._most:
            raise FeedError(f"it wants {connection.sending.limit} bytes of probes, and {self._most} were agreed on")
        if not self.session.backlog:  # credit from a doctor is its wish for probes
            self._sender.fill()

    def patience(self) -> float:
        if self.session.connection.sending.available and not self.session.backlog:
            return 0.0
        return _LATER

    def gone(self) -> None:
        if self._inside:
            self._inside = False
            self._doctors.leave()
