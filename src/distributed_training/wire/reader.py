"""Bytes in any pieces become frames: header, then metadata, then payload, each asked for only once the one before is
approved.

There are two ways in. `feed(data)` copies from memory the caller has (a WebSocket message). `get_buffer` and
`buffer_updated` let a socket write into memory given out here: while a payload arrives that is the payload's own
memory, which is never copied; else a small scratch buffer, so that one read can bring a header and its metadata
together. Of a payload only what came along with its header, at most `READ_AHEAD` bytes, is copied once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum

from distributed_training.wire.frames import HEADER_SIZE, Header, check_sum, unpack_header

READ_AHEAD = 4096
FIRST_READ = 256
"""As long as the peer has proved nothing, no more than this is taken from it at once."""


class FrameHandler(ABC):
    """Judges the frames that a reader takes in. A method may raise PeerError, after which the reader is of no use."""

    @abstractmethod
    def header_arrived(self, header: Header) -> None:
        """Raises unless this frame may come now, with these lengths."""

    @abstractmethod
    def metadata_arrived(self, header: Header, metadata: bytearray) -> memoryview | None:
        """The memory for the payload, exactly as long; None where none travels."""

    @abstractmethod
    def frame_arrived(self, header: Header) -> None:
        """The frame is complete."""


class _Stage(Enum):
    HEADER = 0
    METADATA = 1
    PAYLOAD = 2


class FrameReader:
    """The state between two pieces of the stream."""

    def __init__(self, handler: FrameHandler) -> None:
        self._handler = handler
        self._head = bytearray(HEADER_SIZE)
        self._head_view = memoryview(self._head)
        self._metadata = bytearray()
        self._scratch = memoryview(bytearray(FIRST_READ))
        self._header: Header | None = None
        self._stage = _Stage.HEADER
        self._target = self._head_view
        """What is still missing of the present stage."""

    def read_ahead(self) -> None:
        """Take more at once from here on. To be called while a frame is handled."""
        self._scratch = memoryview(bytearray(READ_AHEAD))

    @property
    def between_frames(self) -> bool:
        """Whether nothing of a frame has arrived yet that is not complete."""
        return self._stage is _Stage.HEADER and len(self._target) == HEADER_SIZE

    @property
    def missing(self) -> int:
        """Bytes of a payload that are still to come; 0 where none is arriving."""
        return len(self._target) if self._stage is _Stage.PAYLOAD else 0

    def get_buffer(self) -> memoryview:
        """Where the next bytes should be written. Never empty."""
        return self._target if self._stage is _Stage.PAYLOAD else self._scratch

    def buffer_updated(self, size: int) -> None:
        """So many bytes were written into what `get_buffer` gave."""
        if self._stage is _Stage.PAYLOAD:
            self._advance(size)
        else:
            self.feed(self._scratch[:size])

    def feed(self, data: memoryview) -> None:
        """Take in bytes, of any number of frames."""
        while data:
            target = self._target
            size = min(len(target), len(data))
            target[:size] = data[:size]
            data = data[size:]
            self._advance(size)

    def _advance(self, size: int) -> None:
        """So many bytes of the present stage have come."""
        target = self._target = self._target[size:]
        while not target:
            if self._stage is _Stage.HEADER:
                self._header = unpack_header(self._head)
                self._handler.header_arrived(self._header)
                self._stage, self._metadata = _Stage.METADATA, bytearray(self._header.metadata)
                target = memoryview(self._metadata)
            elif self._stage is _Stage.METADATA:
                assert self._header is not None
                check_sum(self._header, self._head, self._metadata)
                target = self._handler.metadata_arrived(self._header, self._metadata) or memoryview(b"")
                self._stage = _Stage.PAYLOAD
            else:
                assert self._header is not None
                self._handler.frame_arrived(self._header)
                self._stage, target = _Stage.HEADER, self._head_view
            self._target = target
