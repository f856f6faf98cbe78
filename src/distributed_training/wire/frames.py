"""Frames: a header of 40 bytes, then metadata, then a payload. `docs/protocol.md` is the specification.

The checksum covers the header and the metadata, not the payload. A wrong length or kind would make nonsense of all
that follows, so it must be seen at once, and costs nothing to see. The payload is checked by what carries it (TCP on
one machine, TLS between machines, SHA-256 for files): a second pass over gigabytes a second would cost more than all
else here.
"""

from __future__ import annotations

import struct
from enum import IntEnum, IntFlag
from typing import NamedTuple
from zlib import crc32

from distributed_training.wire.errors import PeerError, Reason

MAGIC = b"dtw"
VERSION = 1
"""The newest version this code speaks; `MIN_VERSION` is the oldest."""
MIN_VERSION = 1
GREETING_VERSION = 1
"""The version in the headers of the frames before authentication, whose layout never changes."""
ALIGNMENT = 64

_HEADER = struct.Struct("<3sBBBHQQQI")
_CHECKSUM = struct.Struct("<I")
HEADER_SIZE = _HEADER.size + _CHECKSUM.size
_CHECKED = _HEADER.size


class Kind(IntEnum):
    """What a frame is. The numbers never change meaning."""

    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    ACCEPTED = 4
    REJECTED = 5

    JOIN = 16
    WELCOME = 17
    REFUSED = 18

    REQUEST = 32
    LEASE = 33
    CANCEL = 34
    RELEASE = 35
    PROGRESS = 36
    NO_WORK = 37
    SAMPLE_FAILED = 38

    TASK = 48
    TASK_END = 49

    BATCHES = 64
    RESULTS = 65

    CREDIT = 80
    BLOCKED = 81

    BLOB_OFFER = 96
    BLOB_PULL = 97
    BLOB_CHUNK = 98
    BLOB_DONE = 99

    PING = 112
    PONG = 113
    PROBE = 114
    PROBE_REPORT = 115

    GOODBYE = 126
    ERROR = 127


class Flag(IntFlag):
    """Bits of a header. Those not named here must be zero."""

    SHARED = 1
    """The payload lies in memory that both sides share; its place is in the metadata, its length in the header."""


_UNKNOWN_FLAGS = ~int(Flag.SHARED)  # as whole numbers: inverting an IntFlag leaves only the flags it knows
GREETING_KINDS = frozenset({Kind.HELLO, Kind.CHALLENGE, Kind.PROOF, Kind.ACCEPTED, Kind.REJECTED})
BATCH_KINDS = frozenset({Kind.BATCHES, Kind.RESULTS})
PAYLOAD_KINDS = frozenset({Kind.BATCHES, Kind.RESULTS, Kind.BLOB_CHUNK, Kind.PROBE})
KINDS: dict[int, Kind] = {int(kind): kind for kind in Kind}


class Header(NamedTuple):
    """The fixed part of a frame."""

    version: int
    kind: Kind
    flags: int
    stream: int
    """Id of the lease, task or blob it belongs to; 0 for none."""
    offset: int
    """Payload bytes this side sent on this connection before this frame."""
    payload: int
    metadata: int
    checksum: int


def pack_head(
    kind: Kind,
    metadata: bytes,
    *,
    version: int = GREETING_VERSION,
    flags: int = 0,
    stream: int = 0,
    offset: int = 0,
    payload: int = 0,
) -> bytes:
    """Header and metadata of a frame; its payload follows."""
    head = _HEADER.pack(MAGIC, version, kind, flags, 0, stream, offset, payload, len(metadata))
    return b"".join((head, _CHECKSUM.pack(crc32(metadata, crc32(head))), metadata))


def unpack_header(data: bytes | bytearray) -> Header:
    """Read a header. Says only that it is one: whether it is welcome is for the connection to judge."""
    magic, version, number, flags, reserved, stream, offset, payload, metadata = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise PeerError(f"the peer does not speak this protocol: its first bytes are {bytes(data[:8])!r}")
    kind = KINDS.get(number)
    if kind is None:
        raise PeerError(f"a frame of unknown kind {number}; both sides need the same release")
    if reserved or flags & _UNKNOWN_FLAGS:
        raise PeerError(f"a {kind.name} frame with unknown flags ({flags:#x}, {reserved:#x})")
    (checksum,) = _CHECKSUM.unpack_from(data, _CHECKED)
    return Header(version, kind, flags, stream, offset, payload, metadata, checksum)


def check_sum(header: Header, head: bytes | bytearray, metadata: bytes | bytearray) -> None:
    """Refuse a frame whose header or metadata changed on the way."""
    if crc32(metadata, crc32(memoryview(head)[:_CHECKED])) != header.checksum:
        raise PeerError(f"a {header.kind.name} frame was damaged on the way (checksum)", Reason.DAMAGED)


def aligned(size: int) -> int:
    """The next multiple of 64, where the next buffer begins."""
    return (size + ALIGNMENT - 1) & -ALIGNMENT
