"""One connection, seen from one side, without the connection itself: bytes go in, events come out, and the other way
round.

The carrier (a socket, TLS, a WebSocket) does three things: it writes what arrives into `get_buffer()` and calls
`buffer_updated(n)`, or hands it to `receive_data`; it looks at `events()`; it sends what `data_to_send()` gives.
Time, threads and patience are the carrier's. Not safe for use by two threads at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from distributed_training.wire.auth import GREETING_SIZES, Authentication, read_rejected
from distributed_training.wire.batches import (
    Batch,
    PackedBatch,
    Place,
    ReceivedLayouts,
    Result,
    Sendable,
    SentLayouts,
    encode_batches,
    read_place,
)
from distributed_training.wire.errors import MisuseError, PeerError, Reason
from distributed_training.wire.events import Authenticated, Chunk, Event, Lost, Probe, Rejected
from distributed_training.wire.flow import ReceiveWindow, SendWindow
from distributed_training.wire.frames import (
    BATCH_KINDS,
    GREETING_KINDS,
    GREETING_VERSION,
    PAYLOAD_KINDS,
    Flag,
    Header,
    Kind,
    pack_head,
)
from distributed_training.wire.limits import (
    DEFAULT_MAX_PAYLOAD,
    MAX_BATCHES,
    MAX_BUFFERS,
    MAX_CONTROL,
    MAX_METADATA,
    MAX_TEXT,
)
from distributed_training.wire.memory import Allocate, Locate, allocate_aligned, first_bytes, shared_memory
from distributed_training.wire.messages import (
    Credit,
    Error,
    Join,
    Message,
    Pack,
    Welcome,
    decode_message,
    encode_message,
    new_packer,
    unpack_metadata,
)
from distributed_training.wire.reader import FrameHandler, FrameReader
from distributed_training.wire.states import OPEN, TABLE, Role, State


class Connection(FrameHandler):
    """One side of a conversation. Any role but the server has its greeting ready at once, whoever opened it."""

    def __init__(
        self,
        role: Role,
        *,
        token: bytes | None,
        binding: bytes = b"",
        max_payload: int = DEFAULT_MAX_PAYLOAD,
        allocate: Allocate = allocate_aligned,
        locate: Locate | None = None,
        nonce: bytes | None = None,
    ) -> None:
        """`token=None` means that there is none; `binding` is the fingerprint of the connection's TLS certificate."""
        self.role = role
        self.state = State.HELLO
        self.codecs: frozenset[int] = frozenset()
        """Codecs agreed on in the handshake."""
        self.shared = False
        """Whether payloads may travel in shared memory."""
        self.sending = SendWindow()
        self.receiving = ReceiveWindow()
        self._authentication = Authentication(role, token, binding, nonce)
        self._reader = FrameReader(self)
        self._events: deque[Event] = deque()
        self._out: list[Sendable] = []
        self._max_payload = max_payload
        self._peer_max_payload = max_payload
        self._offered: frozenset[int] = frozenset()
        self._allocate, self._locate = allocate, locate
        self._pack: Pack
        self._sent_layouts: SentLayouts
        self._received_layouts: ReceivedLayouts
        self._failure: PeerError | None = None
        self._arriving: Any = None
        self._memory: Any = None
        if role is not Role.SERVER:
            self._greet(Kind.HELLO, self._authentication.hello())

    # -- facts

    @property
    def peer(self) -> Role | None:
        """Who the other side is; None until it has said so."""
        return self._authentication.peer_role

    @property
    def authenticated(self) -> bool:
        """Whether both sides have proved the token."""
        return State.JOIN <= self.state < State.CLOSED and self._failure is None

    @property
    def is_open(self) -> bool:
        """Whether the handshake is done and nobody has left."""
        return self.state in _OPEN_STATES and self._failure is None

    @property
    def closed(self) -> bool:
        """Whether nothing more can be sent or received."""
        return self.state is State.CLOSED or self._failure is not None

    # -- bytes in

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """Take in bytes in any pieces. PeerError: send what `data_to_send` still gives, then close."""
        if self._failure is not None:
            raise self._failure
        try:
            self._reader.feed(memoryview(data).cast("B"))
        except Exception as error:
            self._fail(error)
            raise

    def get_buffer(self) -> memoryview:
        """Memory to receive the next bytes into; while a payload arrives, that payload's own."""
        return self._reader.get_buffer()

    @property
    def missing(self) -> int:
        """Bytes of a payload that are still to come; 0 where none is arriving: anything may come next."""
        return self._reader.missing

    def buffer_updated(self, size: int) -> None:
        """So many bytes were received into what `get_buffer` gave."""
        if self._failure is not None:
            raise self._failure
        try:
            self._reader.buffer_updated(size)
        except Exception as error:
            self._fail(error)
            raise

    def receive_eof(self) -> None:
        """The stream ended. Without a goodbye before, there is a `Lost` event."""
        if not self.closed:
            self._events.append(Lost(self.state, not self._reader.between_frames))
            self.state = State.CLOSED
        self._arriving = self._memory = None

    def events(self) -> Iterator[Event]:
        """What has arrived since the last call."""
        while self._events:
            yield self._events.popleft()

    def _fail(self, error: Exception) -> None:
        """The peer broke the rules, or this side failed (no memory): say so, as far as it has proved who it is."""
        if not isinstance(error, PeerError):
            error = PeerError(f"the other side failed: {type(error).__name__}", Reason.INTERNAL)
        self._arriving = self._memory = None
        state = self.state
        if (self.role, state, Kind.ERROR) in TABLE:
            self.send(Error(error.reason, str(error)[:MAX_TEXT]))
        elif self.role is Role.SERVER and state < State.JOIN:
            self._greet(Kind.REJECTED, self._authentication.rejected(error.reason), State.CLOSED)
        self._failure = error

    # -- frames in (called by the reader)

    def header_arrived(self, header: Header) -> None:
        """Refuse a frame that may not come now, or is too long, before any memory is taken for it."""
        kind = header.kind
        sender = self.peer if self.peer is not None else Role.WORKER  # for a greeting every role is alike
        if (sender, self.state, kind) not in TABLE:
            raise PeerError(
                f"the {_name(self.peer)} sent {kind.name} in state {self.state.name}, where it is not allowed"
            )
        greeting = kind in GREETING_KINDS
        if header.version != (GREETING_VERSION if greeting else self._authentication.version):
            raise PeerError(f"a {kind.name} frame of protocol version {header.version}", Reason.VERSION)
        if header.flags and (kind not in BATCH_KINDS or not self.shared):
            raise PeerError(f"a {kind.name} frame in shared memory, which was not agreed on")
        if greeting:
            too_long = header.metadata != GREETING_SIZES[kind] or header.stream != 0
        else:
            too_long = header.metadata > (MAX_METADATA if kind in BATCH_KINDS else MAX_CONTROL)
        if too_long or header.payload > (self._max_payload if kind in PAYLOAD_KINDS else 0):
            raise PeerError(
                f"a {kind.name} frame with {header.metadata} bytes of metadata and {header.payload} of payload, more "
                "than is allowed",
                Reason.LIMIT,
            )
        self.receiving.check(header.offset, header.payload)

    def metadata_arrived(self, header: Header, metadata: bytearray) -> memoryview | None:
        """Read the metadata; only when it fits the payload, take memory for that."""
        kind = header.kind
        if kind in GREETING_KINDS:
            self._arriving = bytes(metadata)
            return None
        fields = unpack_metadata(metadata)
        if kind in BATCH_KINDS:
            event = Batch if kind is Kind.BATCHES else Result
            self._arriving = self._received_layouts.read(fields, event, header.stream, header.payload, self.codecs)
            place = read_place(fields, bool(header.flags & Flag.SHARED))
            if place is not None:
                self._memory = shared_memory(self._locate, *place, header.payload)
                return None
        elif kind in PAYLOAD_KINDS:
            if type(fields) is not list or len(fields) != 1 or type(fields[0]) is not int or not 0 <= fields[0] < 2**63:
                raise PeerError(f"a {kind.name} frame without its position")
            self._arriving = fields[0]
        else:
            self._arriving = decode_message(kind, header.stream, fields)
            return None
        if not header.payload:
            self._memory = b""
            return None
        self._memory = self._allocate(header.payload, kind, header.stream)
        return first_bytes(self._memory, header.payload)

    def frame_arrived(self, header: Header) -> None:
        """Change state, note what this side must know itself, and tell the caller."""
        kind, arrived, memory = header.kind, self._arriving, self._memory
        self._arriving = self._memory = None
        self.receiving.received += header.payload
        if self.state is State.CLOSED:  # this side gave up while the frame was arriving
            return
        if kind in BATCH_KINDS:
            view, at = first_bytes(memory, header.payload), 0
            for batch in arrived:
                at = batch.attach(view, at)
                batch.memory = memory
            self._events.extend(arrived)
            return
        if kind in GREETING_KINDS:
            self._greeting_arrived(kind, arrived)
            return
        assert self.peer is not None
        self.state = TABLE[self.peer, self.state, kind]
        if kind is Kind.BLOB_CHUNK:
            self._events.append(Chunk(header.stream, arrived, first_bytes(memory, header.payload), memory))
        elif kind is Kind.PROBE:
            self._events.append(Probe(arrived, header.payload, memory))
        else:
            self._note(arrived)
            self._events.append(arrived)

    def _note(self, message: Message) -> None:
        """What a message that arrived means for this side of the connection."""
        if isinstance(message, Credit):
            self.sending.raise_limit(message.limit)
        elif isinstance(message, Join):
            self._peer_max_payload = message.max_payload
            self._offered = frozenset(message.codecs)
        elif isinstance(message, Welcome):
            if not self._offered.issuperset(message.codecs) or (message.shared and self._locate is None):
                raise PeerError("the server chose something in the handshake that was not offered")
            self._peer_max_payload = message.max_payload
            self.codecs, self.shared = frozenset(message.codecs), message.shared

    # -- authentication

    def _greet(self, kind: Kind, body: bytes, state: State | None = None) -> None:
        self._out.append(memoryview(pack_head(kind, body)))
        self.state = state if state is not None else TABLE[self.role, self.state, kind]

    def _greeting_arrived(self, kind: Kind, body: bytes) -> None:
        """The four frames that prove the token answer themselves."""
        own = self._authentication
        if kind is Kind.REJECTED:
            reason, versions = read_rejected(body)
            self.state = State.CLOSED
            self._events.append(Rejected(reason, versions))
            return
        if kind is Kind.HELLO:
            self.state = State.CHALLENGE
            own.read_hello(body)
            self._greet(Kind.CHALLENGE, own.challenge())
        elif kind is Kind.CHALLENGE:
            own.read_challenge(body)
            self.state = State.PROOF
            self._greet(Kind.PROOF, own.proof(self.role))
        else:
            own.check_proof(body)
            self.state = State.VERDICT if kind is Kind.PROOF else State.JOIN
            if kind is Kind.PROOF:
                self._greet(Kind.ACCEPTED, own.proof(self.role))
            self._begin()

    def _begin(self) -> None:
        """Only now that the peer has proved the token take what costs memory."""
        own = self._authentication
        assert own.peer_role is not None
        self._pack = new_packer()
        self._sent_layouts, self._received_layouts = SentLayouts(self._pack), ReceivedLayouts(self._max_payload)
        self._reader.read_ahead()
        self._events.append(Authenticated(own.peer_role, own.version))

    # -- messages out

    def data_to_send(self) -> list[Sendable]:
        """All that is to be sent, in order, as flat views of bytes; payloads are views of the batches themselves, and
        those of scattered rows as they are."""
        out, self._out = self._out, []
        return out

    def send(self, message: Message) -> None:
        """Send a control message."""
        state = self._allowed(message.KIND)
        stream, metadata = encode_message(message, self._pack)
        if isinstance(message, Credit):
            self.receiving.grant(message.limit)
        elif isinstance(message, Join):
            self._offered = frozenset(message.codecs)
        elif isinstance(message, Welcome):
            if not self._offered.issuperset(message.codecs) or (message.shared and self._locate is None):
                raise MisuseError("a Welcome may only choose what was offered, and sharing memory needs `locate`")
            self.codecs, self.shared = frozenset(message.codecs), message.shared
        self._queue(message.KIND, metadata, stream)
        self.state = state

    def send_credit(self, limit: int) -> None:
        """Let the peer send payload up to this absolute position."""
        self.send(Credit(limit))

    def send_batches(self, lease: int, batches: Sequence[PackedBatch], place: Place | None = None) -> None:
        """Send batches of one lease (or task) in one frame; `place` says where in shared memory they lie already."""
        self._send_batches(Kind.BATCHES, lease, batches, place)

    def send_results(self, task: int, results: Sequence[PackedBatch], place: Place | None = None) -> None:
        """Send predictions or metrics of one task in one frame."""
        self._send_batches(Kind.RESULTS, task, results, place)

    def send_chunk(self, blob: int, position: int, data: bytes | memoryview) -> None:
        """Send a part of a file."""
        self._send_payload(Kind.BLOB_CHUNK, blob, position, data)

    def send_probe(self, number: int, data: bytes | memoryview) -> None:
        """Send bytes that mean nothing, to measure bandwidth."""
        self._send_payload(Kind.PROBE, 0, number, data)

    def _send_batches(self, kind: Kind, stream: int, batches: Sequence[PackedBatch], place: Place | None) -> None:
        self._allowed(kind, stream)
        size = sum([batch.size for batch in batches])
        if not 0 < sum([batch.steps for batch in batches]) <= MAX_BATCHES or (place is not None and not self.shared):
            raise MisuseError(f"a frame of {len(batches)} batches, place {place}")
        if sum([len(batch.buffers) for batch in batches]) > MAX_BUFFERS:
            raise MisuseError(f"a frame of more than {MAX_BUFFERS} buffers; send fewer batches in one")
        if any(codec not in self.codecs for batch in batches if batch.coded for codec, _ in batch.coded.values()):
            raise MisuseError(f"a batch compressed by a codec that was not agreed on ({sorted(self.codecs)})")
        self._check_credit(size, size + sum([batch.saved for batch in batches]))
        metadata = encode_batches(batches, self._sent_layouts, place)
        self._queue(kind, metadata, stream, size, 0 if place is None else Flag.SHARED)
        if place is None:
            for batch in batches:
                batch.chunks(self._out)

    def _send_payload(self, kind: Kind, stream: int, position: int, data: bytes | memoryview) -> None:
        self._allowed(kind, stream, position)
        view = memoryview(data).cast("B")
        self._check_credit(len(view), len(view))
        self._queue(kind, self._pack([position]), stream, len(view))
        if len(view):
            self._out.append(view)

    def _allowed(self, kind: Kind, *numbers: int) -> State:
        """The state after sending this; raises where it may not be sent."""
        if self._failure is not None:
            raise MisuseError(f"nothing can be sent any more, the connection failed: {self._failure}")
        state = TABLE.get((self.role, self.state, kind))
        if state is None or kind in GREETING_KINDS:
            raise MisuseError(f"a {_name(self.role)} may not send {kind.name} in state {self.state.name}")
        if any(not 0 <= number < 2**63 for number in numbers):
            raise MisuseError(f"{kind.name} with numbers {numbers}")
        return state

    def _check_credit(self, size: int, raw: int) -> None:
        if raw > self._peer_max_payload:
            raise MisuseError(f"a payload of {raw} bytes; the peer accepts {self._peer_max_payload} in one frame")
        self.sending.check(size)

    def _queue(self, kind: Kind, metadata: bytes, stream: int, payload: int = 0, flags: int = 0) -> None:
        offset = self.sending.take(payload)
        head = pack_head(
            kind,
            metadata,
            version=self._authentication.version,
            flags=flags,
            stream=stream,
            offset=offset,
            payload=payload,
        )
        self._out.append(memoryview(head))


_OPEN_STATES = frozenset(OPEN.values())


def _name(role: Role | None) -> str:
    return "peer" if role is None else role.name.lower()
