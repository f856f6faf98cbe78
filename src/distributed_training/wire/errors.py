"""Who broke the rules: the peer, or the program that uses the connection."""

from __future__ import annotations

from enum import IntEnum

from distributed_training.runtime.errors import ProtocolError

__all__ = ["AuthenticationError", "MisuseError", "PeerError", "ProtocolError", "Reason"]


_LONGEST = 500


class Reason(IntEnum):
    """Why a peer is refused, why somebody leaves, what went wrong. Travels as its number; the numbers never change."""

    DONE = 0
    SHUTTING_DOWN = 1
    PROTOCOL = 2
    VERSION = 3
    TOKEN_NEEDED = 4
    TOKEN_UNEXPECTED = 5
    TOKEN_WRONG = 6
    ROLE = 7
    DATASET = 8
    PLAN = 9
    CONFIG = 10
    BUSY = 11
    ADDRESS = 12
    LIMIT = 13
    CREDIT = 14
    INTERNAL = 15
    TIMEOUT = 16
    SAMPLE = 17
    CANCELLED = 18
    DAMAGED = 19


class PeerError(ProtocolError):
    """The peer sent something that the protocol forbids. The connection is of no use any more: close it."""

    def __init__(self, message: str, reason: Reason = Reason.PROTOCOL) -> None:
        # It may quote what the peer sent: no line of a log should be longer because of that.
        super().__init__(message if len(message) <= _LONGEST else message[:_LONGEST] + " ...")
        self.reason = reason


class AuthenticationError(PeerError):
    """The peer could not prove that it knows the token of this run."""


class MisuseError(ProtocolError):
    """This program asked the connection for something that the protocol forbids. Nothing was sent."""
