"""What happens on a connection. Control messages and batches are events themselves; these are the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distributed_training.wire.batches import Batch
from distributed_training.wire.errors import Reason
from distributed_training.wire.messages import Message
from distributed_training.wire.states import Role, State


@dataclass(frozen=True)
class Authenticated:
    """Both sides have proved the token."""

    peer: Role
    version: int


@dataclass(frozen=True)
class Rejected:
    """The server refused before authentication. Whoever answered has proved nothing, so take it as a hint."""

    reason: Reason
    versions: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Chunk:
    """A part of a file."""

    blob: int
    position: int
    data: memoryview
    memory: Any


@dataclass(frozen=True, eq=False)
class Probe:
    """Bytes sent only to see how fast they arrive."""

    number: int
    size: int
    memory: Any


@dataclass(frozen=True)
class Lost:
    """The stream ended without a goodbye."""

    state: State
    inside_frame: bool


Event = Message | Batch | Authenticated | Rejected | Chunk | Probe | Lost
