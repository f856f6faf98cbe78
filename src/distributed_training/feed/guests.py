"""What a connection's other end may be: a worker, a client, a doctor. One class for each, driven by its `Session`.

`Session` does what all have in common: TLS, the token, `JOIN`, pings and silence, goodbyes, errors, and the loop that
receives and sends. Once the guest has said `JOIN`, it makes the `Guest` of that role and calls it, always from the
connection's own thread, in this order:

    admit(join)         once; a `Welcome` lets the guest in, a `Refused` turns it away and ends the connection
    hear(event)         for each event but those of the session itself: Ping, Pong, Goodbye, Lost, Error
    heard()             when all that arrived together was heard
    speak(now)          after that, when woken, and at the latest after `patience()` seconds: send what is due with
                        `session.connection.send...`; the session hands it to the socket
    farewell()          before this side says goodbye because all is done
    gone()              at the end, however it came; also after a refusal

A method must not block: while it does, nothing is received or sent on this connection. A `PeerError` raised here tells
the peer that it broke the rules; any other `DistributedTrainingError` ends the connection and is logged with the
peer's name and address. While `session.leaving`, one side has said goodbye: what still arrives is heard, nothing may
be sent. Other threads call `session.wake()` to have `speak` called soon, and nothing else.

Payload comes only as far as credit was granted (`connection.send_credit(limit)`, absolute, only growing): what a guest
class grants is its bound on memory, and `session.window` counts and measures for it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from distributed_training.wire import Reason
from distributed_training.wire.messages import Join, Refused, Welcome

if TYPE_CHECKING:
    from distributed_training.feed.session import Session
    from distributed_training.wire.events import Event


class Guest(ABC):
    """The GPU side's view of one guest that has proved the token."""

    def __init__(self, session: Session) -> None:
        self.session = session

    @abstractmethod
    def admit(self, join: Join) -> Welcome | Refused:
        """Let the guest take part, or say why not. `session.name` is its name in logs already."""

    @abstractmethod
    def hear(self, event: Event) -> None:
        """Deal with something that arrived."""

    def heard(self) -> None:  # noqa: B027 (optional)
        """All that arrived together was heard."""

    def speak(self, now: float) -> None:  # noqa: B027 (optional)
        """Send what is due now. The connection is open."""

    def patience(self) -> float:
        """Seconds after which `speak` is to be called though nothing happens."""
        return math.inf

    def farewell(self) -> None:  # noqa: B027 (optional)
        """This side is about to say goodbye, because all is done. The connection is open."""

    def gone(self) -> None:  # noqa: B027 (optional)
        """The connection ended."""


MakeGuest = Callable[["Session"], Guest]


class Unwanted(Guest):
    """A guest of a kind that this server has nothing to say to."""

    def __init__(self, session: Session, text: str) -> None:
        super().__init__(session)
        self._text = text

    def admit(self, join: Join) -> Welcome | Refused:
        return Refused(Reason.ROLE, self._text)

    def hear(self, event: Event) -> None:
        raise AssertionError("nobody who was refused is heard")
