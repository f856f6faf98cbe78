"""The control messages: small, without payload, each a dataclass that knows what its fields may hold.

On the wire a message is the array of its fields in order; the one named by `STREAM` travels in the header instead.
The same checks hold for what is sent (a mistake here is a MisuseError) and for what arrives (a mistake there is a
PeerError).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Annotated, Any, ClassVar, get_type_hints

import msgpack

from distributed_training.wire.errors import MisuseError, PeerError, Reason
from distributed_training.wire.fields import U32, U63, Check, Codecs, Digest, Facts, Seconds, Text, Truth, one_of
from distributed_training.wire.frames import Kind
from distributed_training.wire.limits import MAX_CONTROL, MAX_FACTS, MAX_ITEMS
from distributed_training.wire.tensors import ERRORS


class Work(IntEnum):
    """Why there is no lease."""

    WAIT = 0
    """Every step within the horizon is leased: one will come."""
    FINISHED = 1
    """The run is over."""
    LATER = 2
    """Ask again after the given time."""


Why = Annotated[Reason, one_of(Reason)]
WorkState = Annotated[Work, one_of(Work)]


Pack = Callable[[Any], bytes]


def new_packer() -> Pack:
    """What writes metadata. One for each connection: making one takes long, and two threads must not share one."""
    return msgpack.Packer(unicode_errors=ERRORS).pack


class Message:
    """Base of all control messages."""

    KIND: ClassVar[Kind]
    STREAM: ClassVar[str | None] = None


@dataclass(frozen=True)
class Join(Message):
    """The guest says what it has: the first message after authentication."""

    KIND = Kind.JOIN
    name: Text
    """For people: host and process."""
    software: Text
    """Version of the package."""
    dataset: Text
    """Fingerprint of its dataset."""
    plan: U32
    """Version of the sample plan."""
    facts: Facts
    """Settings that must be equal on both sides, such as seed and global batch size."""
    codecs: Codecs
    """Codecs it can undo and use."""
    host: Text
    """Names the machine, so that both sides on one may share memory; empty to never do so."""
    max_payload: U63
    """The largest payload it accepts."""


@dataclass(frozen=True)
class Welcome(Message):
    """The server takes the peer."""

    KIND = Kind.WELCOME
    session: Text
    """Names this connection in logs of both sides."""
    software: Text
    facts: Facts
    codecs: Codecs
    """Codecs that may be used, some of those offered."""
    shared: Truth
    """Whether payloads may travel in shared memory."""
    max_payload: U63


@dataclass(frozen=True)
class Refused(Message):
    """The server does not take the peer; the connection ends."""

    KIND = Kind.REFUSED
    reason: Why
    text: Text


@dataclass(frozen=True)
class Request(Message):
    """A worker asks for leases of so many steps."""

    KIND = Kind.REQUEST
    steps: U32


@dataclass(frozen=True)
class Lease(Message):
    """The server lends the steps [first, last) of an epoch, one rank's rows of each, for some time."""

    KIND, STREAM = Kind.LEASE, "lease"
    lease: U63
    epoch: U32
    first: U63
    last: U63
    rank: U32
    ranks: U32
    seconds: Seconds
    """How long it holds, from its arrival: a duration, for clocks differ."""

    def __post_init__(self) -> None:
        if type(self.first) is int and type(self.last) is int and not self.first < self.last:
            raise ValueError(f"a lease of the steps from {self.first} to {self.last} is empty")
        if type(self.rank) is int and type(self.ranks) is int and not self.rank < self.ranks:
            raise ValueError(f"a lease for rank {self.rank} of {self.ranks}")


@dataclass(frozen=True)
class Cancel(Message):
    """The server takes a lease or task back. Batches that are on their way do no harm."""

    KIND, STREAM = Kind.CANCEL, "lease"
    lease: U63
    reason: Why
    text: Text


@dataclass(frozen=True)
class Release(Message):
    """A worker gives back the steps of a lease from `first` on."""

    KIND, STREAM = Kind.RELEASE, "lease"
    lease: U63
    first: U63
    reason: Why


@dataclass(frozen=True)
class Progress(Message):
    """Where training is, how many steps ahead of it may be prepared, and what people want to see of it."""

    KIND = Kind.PROGRESS
    epoch: U32
    step: U63
    horizon: U32
    queue: U32
    """Steps that are ready."""
    waited: U32
    """Thousandths of the time that training waited for batches."""
    loaders: U32
    """Workers connected."""


@dataclass(frozen=True)
class NoWork(Message):
    """There is no lease to give now, or ever."""

    KIND = Kind.NO_WORK
    state: WorkState
    seconds: Seconds


@dataclass(frozen=True)
class SampleFailed(Message):
    """The dataset raised on one sample of a step."""

    KIND, STREAM = Kind.SAMPLE_FAILED, "lease"
    lease: U63
    epoch: U32
    step: U63
    sample: U63
    text: Text


@dataclass(frozen=True)
class Task(Message):
    """A client begins a validation or an inference; its batches follow."""

    KIND, STREAM = Kind.TASK, "task"
    task: U63
    mode: Text
    facts: Facts


@dataclass(frozen=True)
class TaskEnd(Message):
    """A client has sent all batches of a task."""

    KIND, STREAM = Kind.TASK_END, "task"
    task: U63
    samples: U63


@dataclass(frozen=True)
class Credit(Message):
    """The peer may send payload up to this absolute position."""

    KIND = Kind.CREDIT
    limit: U63


@dataclass(frozen=True)
class Blocked(Message):
    """A payload of this size waits for credit."""

    KIND = Kind.BLOCKED
    size: U63


@dataclass(frozen=True)
class BlobOffer(Message):
    """A file can be had: a checkpoint coming home, a file of predictions."""

    KIND, STREAM = Kind.BLOB_OFFER, "blob"
    blob: U63
    name: Text
    size: U63
    digest: Digest
    """SHA-256 of the whole."""


@dataclass(frozen=True)
class BlobPull(Message):
    """Send the file from this position on; not 0 where an earlier connection brought a part of it."""

    KIND, STREAM = Kind.BLOB_PULL, "blob"
    blob: U63
    position: U63


@dataclass(frozen=True)
class BlobDone(Message):
    """The receiver has the whole file and its hash is right, or gives it up."""

    KIND, STREAM = Kind.BLOB_DONE, "blob"
    blob: U63
    good: Truth
    text: Text


@dataclass(frozen=True)
class Ping(Message):
    """Answer this with a Pong."""

    KIND = Kind.PING
    number: U63
    clock: U63
    """Nanoseconds of the sender's clock, for the sender to read in the answer."""


@dataclass(frozen=True)
class Pong(Message):
    """The answer to a Ping."""

    KIND = Kind.PONG
    number: U63
    clock: U63
    """What the Ping said."""
    here: U63
    """Nanoseconds since 1970 of the answering side's clock."""


@dataclass(frozen=True)
class ProbeReport(Message):
    """How long so many bytes of probes took to arrive."""

    KIND = Kind.PROBE_REPORT
    number: U63
    size: U63
    seconds: Seconds


@dataclass(frozen=True)
class Goodbye(Message):
    """The sender sends nothing after this."""

    KIND = Kind.GOODBYE
    reason: Why
    text: Text


@dataclass(frozen=True)
class Error(Message):
    """Something is wrong that cannot be repaired; the connection ends."""

    KIND = Kind.ERROR
    reason: Why
    text: Text


MESSAGES: dict[Kind, type[Message]] = {cls.KIND: cls for cls in Message.__subclasses__()}


def _fields_of(cls: type[Message]) -> list[tuple[str, Check]]:
    hints = get_type_hints(cls, include_extras=True)
    return [(field.name, hints[field.name].__metadata__[0]) for field in fields(cls)]  # type: ignore[arg-type]


_FIELDS: dict[Kind, list[tuple[str, Check]]] = {kind: _fields_of(cls) for kind, cls in MESSAGES.items()}


def encode_message(message: Message, pack: Pack) -> tuple[int, bytes]:
    """(stream, metadata) of a message."""
    stream, values = 0, []
    for name, check in _FIELDS[message.KIND]:
        try:
            value = check(getattr(message, name))
        except ValueError as error:
            raise MisuseError(f"{type(message).__name__}.{name} {error}, not {getattr(message, name)!r}") from None
        if name == message.STREAM:
            stream = value
        else:
            values.append(int(value) if isinstance(value, IntEnum) else value)
    try:
        metadata = pack(values)
    except (ValueError, OverflowError) as error:
        raise MisuseError(f"a {type(message).__name__} cannot be sent: {error}") from None
    if len(metadata) > MAX_CONTROL:
        raise MisuseError(f"a {type(message).__name__} of {len(metadata)} bytes; at most {MAX_CONTROL} can be sent")
    return stream, metadata


def decode_message(kind: Kind, stream: int, metadata: Any) -> Message:
    """The message, with every field checked."""
    cls, checks = MESSAGES[kind], _FIELDS[kind]
    names = [name for name, _ in checks if name != cls.STREAM]
    if type(metadata) is not list or len(metadata) != len(names) or (cls.STREAM is None and stream):
        raise PeerError(f"a {kind.name} message that does not have the fields {', '.join(names)}")
    given: dict[str, Any] = dict(zip(names, metadata))
    if cls.STREAM is not None:
        given[cls.STREAM] = stream
    try:
        return cls(**{name: _checked(name, check, given[name]) for name, check in checks})
    except ValueError as error:
        raise PeerError(f"a {kind.name} message that makes no sense: {error}") from None


def _checked(name: str, check: Check, value: Any) -> Any:
    try:
        return check(value)
    except ValueError as error:
        raise ValueError(f"{name} {error}") from None


def unpack_metadata(metadata: bytes | bytearray) -> Any:
    """msgpack within limits: no extension types, no maps but those with string keys, no array of absurd length."""
    try:
        return msgpack.unpackb(
            metadata,
            raw=False,
            strict_map_key=True,
            unicode_errors=ERRORS,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_FACTS,
            max_ext_len=0,
        )
    except Exception as error:  # msgpack raises its own kinds, ValueError, UnicodeDecodeError and more
        raise PeerError(f"metadata that cannot be read ({type(error).__name__})") from None
