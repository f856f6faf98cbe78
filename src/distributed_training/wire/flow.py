"""Byte credits: how much payload may be on its way, as absolute positions in everything ever sent.

Each direction has its own count. The receiver says "you may send up to byte N of all payload on this connection"; N
only grows. Being absolute, a credit lost, repeated or late does no harm, and both sides can always tell whether they
agree. The receiver never takes memory for more than it granted, so its grants are its bound on memory. How much to
grant is not decided here.
"""

from __future__ import annotations

from distributed_training.wire.errors import MisuseError, PeerError, Reason


class SendWindow:
    """What this side may still send."""

    __slots__ = ("limit", "sent")

    def __init__(self) -> None:
        self.sent = 0
        self.limit = 0

    @property
    def available(self) -> int:
        """Payload bytes that may be sent now."""
        return self.limit - self.sent

    def check(self, size: int) -> None:
        """Refuse a payload that the credit does not cover."""
        if size > self.limit - self.sent:
            raise MisuseError(
                f"a payload of {size} bytes needs more than the {self.available} bytes of credit that are left; wait "
                "for the peer's Credit, and say Blocked if a single batch needs more than the peer ever grants"
            )

    def take(self, size: int) -> int:
        """Use credit for a payload; its position in all that was sent."""
        position = self.sent
        self.sent += size
        return position

    def raise_limit(self, limit: int) -> None:
        """The peer granted credit."""
        if limit < self.limit:
            raise PeerError(f"the peer took back credit: from {self.limit} to {limit}", Reason.CREDIT)
        self.limit = limit


class ReceiveWindow:
    """What the peer may still send."""

    __slots__ = ("granted", "received")

    def __init__(self) -> None:
        self.received = 0
        self.granted = 0

    def check(self, offset: int, size: int) -> None:
        """Refuse a payload that is not where the last one ended, or goes beyond what was granted."""
        if offset != self.received:
            raise PeerError(f"the peer counts {offset} payload bytes sent, {self.received} arrived", Reason.CREDIT)
        if size > self.granted - self.received:
            raise PeerError(
                f"the peer sends {size} bytes with a credit of {self.granted - self.received}", Reason.CREDIT
            )

    def grant(self, limit: int) -> None:
        """Let the peer send up to this absolute position."""
        if limit < self.granted:
            raise MisuseError(f"credit cannot be taken back: {self.granted} bytes were granted, not {limit}")
        self.granted = limit
