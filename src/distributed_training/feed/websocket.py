"""WebSocket (RFC 6455) as a wrapping of a channel's bytes: the same frames, inside binary messages.

Tunnels and HTTP proxies carry these and little else. Where a message begins and ends means nothing to what is inside.
Messages that a client sends are masked, as the RFC wants it: large pieces are masked on their way into memory that is
used again and again, small ones are joined first. What arrives is received into the memory that it is meant for, and
unmasked there.
"""

from __future__ import annotations

import os
import struct
import sys

import numpy as np

from distributed_training.feed.outgoing import Read

MESSAGE = 1 << 20
"""Bytes of the longest message that is sent: some tunnels hold a message until it is whole."""
_LARGE = 16 << 10  # bytes from which on a piece is a message of its own
_AHEAD = 64 << 10  # bytes read beyond what is asked for: a copy costs less than a call for each small message
_IDLE_FRAMES = 100  # empty or control frames without any data between them
_HEAD = 16  # bytes before a masked piece that hold its head, so that it lies as the machine likes it
_MOST_PIECES = 2 * (MESSAGE // _LARGE)
_FIX = 32 << 10  # bytes from which on it is worth to find out how a piece lies in memory

_CONTINUED, _TEXT, _BINARY, _CLOSE, _PING, _PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
_NORMAL = struct.pack(">H", 1000)


class WebSocketError(ConnectionError):
    """The peer does not keep to the rules of a WebSocket."""


class WebSocket:
    """One side of a WebSocket whose opening handshake is done. See `channel.Wrapping`."""

    def __init__(self, *, serves: bool, ahead: bytes = b"") -> None:
        """`ahead` is what came right behind the handshake."""
        self._masks = not serves
        self._words = np.empty((MESSAGE + _MOST_PIECES * _HEAD) // 8 if self._masks else 0, np.uint64)
        self._room = self._words.data.cast("B")
        self._ahead = memoryview(bytearray(max(_AHEAD, len(ahead))))
        self._ahead[: len(ahead)] = ahead
        self._begin, self._end = 0, len(ahead)  # what was read ahead and not looked at yet
        self._left = 0  # bytes of a message's payload that are still to come
        self._key, self._at = b"", 0
        self._within = False  # a message that goes on in a further frame
        self._idle = 0
        self._pong: bytes | None = None
        self._closed = False

    # -- in

    def receive_into(self, buffer: memoryview, read: Read) -> int | None:
        """Payload that came; 0 at the end, None when there is nothing now."""
        while not self._closed:
            if self._left:
                return self._payload(buffer, read)
            if not self._head():
                size = self._read_ahead(read)
                if not size:
                    return size
        return 0

    def _payload(self, buffer: memoryview, read: Read) -> int | None:
        room = buffer[: self._left]
        size = min(len(room), self._end - self._begin)
        if size:
            room[:size] = self._ahead[self._begin : self._begin + size]
            self._begin += size
        if size < len(room):
            # With the end of a message the head of the next one comes along, so that it costs no call of its own.
            rest = room[size:]
            got = read([rest, self._ahead] if len(room) == self._left else [rest])
            if got:
                here = min(got, len(rest))
                self._begin, self._end = 0, got - here
                size += here
            elif not size:
                return got
        self._left -= size
        if self._key:
            mask(room[:size], self._key, self._at)
            self._at += size
        return size

    def _read_ahead(self, read: Read) -> int | None:
        rest = self._end - self._begin
        self._ahead[:rest] = bytes(self._ahead[self._begin : self._end])
        self._begin, self._end = 0, rest
        size = read([self._ahead[rest:]])
        self._end += size or 0
        return size

    def _head(self) -> bool:
        """Take the head of the next frame, with all of a control frame; whether it is here."""
        ahead, at, end = self._ahead, self._begin + 2, self._end
        if at > end:
            return False
        first, second = ahead[at - 2], ahead[at - 1]
        length, kind, masked = second & 127, first & 15, second > 127
        if length > 125:
            size = 2 if length == 126 else 8
            if at + size > end:
                return False
            length = int.from_bytes(ahead[at : at + size], "big")
            at += size
        if first & 0x70 or masked == self._masks or length >> 63:
            raise WebSocketError(f"a WebSocket frame with a head of {first:02x}{second:02x}, which makes no sense here")
        if masked:
            if at + 4 > end:
                return False
            self._key, self._at = bytes(ahead[at : at + 4]), 0
            at += 4
        if kind >= _CLOSE:
            return self._control(kind, first > 127, length, at)
        self._data(kind, first > 127, length)
        self._begin = at
        return True

    def _data(self, kind: int, last: bool, length: int) -> None:
        if kind not in (_CONTINUED, _BINARY) or (kind == _CONTINUED) != self._within:
            raise WebSocketError(f"a WebSocket frame of kind {kind}, which may not come here")
        self._within, self._left = not last, length
        self._idle = 0 if length else self._count()

    def _control(self, kind: int, last: bool, length: int, at: int) -> bool:
        if not last or length > 125 or kind > _PONG:
            raise WebSocketError(f"a WebSocket control frame of kind {kind} with {length} bytes")
        if at + length > self._end:
            return False
        body = self._ahead[at : at + length]
        if kind == _PING:
            if self._key:
                mask(body, self._key, 0)
            self._pong = bytes(body)  # only the latest one needs an answer
        self._closed = kind == _CLOSE
        self._begin = at + length
        self._idle = self._count()
        return True

    def _count(self) -> int:
        if self._idle >= _IDLE_FRAMES:
            raise WebSocketError(f"{self._idle} WebSocket frames without anything in them")
        return self._idle + 1

    # -- out

    def encode(self, views: list[memoryview]) -> list[memoryview]:
        """Up to `MESSAGE` bytes of the views as messages."""
        out: list[memoryview] = []
        if self._pong is not None:
            out.append(memoryview(self._small(_PONG, self._pong)))
            self._pong = None
        if views:
            (self._masked if self._masks else self._as_they_are)(views, out)
        return out

    def _as_they_are(self, views: list[memoryview], out: list[memoryview]) -> None:
        """One message of the views themselves."""
        taken, size = 0, 0
        for view in views:
            if size + len(view) > MESSAGE:
                break
            size += len(view)
            taken += 1
        pieces = views[:taken]
        del views[:taken]
        if views and size < MESSAGE - _LARGE:  # one is longer than what fits
            pieces.append(views[0][: MESSAGE - size])
            views[0] = views[0][MESSAGE - size :]
            size = MESSAGE
        out.append(memoryview(_head_of(_BINARY, size, masked=False)))
        out += pieces

    def _masked(self, views: list[memoryview], out: list[memoryview]) -> None:
        """Large pieces as messages of their own in the memory for that, the small ones between them joined."""
        at, taken = 0, 0
        small: list[memoryview] = []
        joined = 0
        for number, view in enumerate(views):
            if len(view) < _LARGE:
                if at + joined + len(view) > MESSAGE:
                    break
                small.append(view)
                joined += len(view)
                taken += 1
                continue
            if small:
                out.append(memoryview(self._small(_BINARY, b"".join(small))))
                small, joined = [], 0
            size = min(len(view), MESSAGE - at)
            if size < _LARGE:
                break
            out.append(self._large(view[:size], at))
            at += size + -size % 8 + _HEAD
            if size < len(view):
                views[number] = view[size:]
                break
            taken += 1
        if small:
            out.append(memoryview(self._small(_BINARY, b"".join(small))))
        del views[:taken]

    def _large(self, view: memoryview, at: int) -> memoryview:
        """A masked message, written at this place of the memory for that."""
        size, key, begin = len(view), os.urandom(4), at + _HEAD
        head = _head_of(_BINARY, size, masked=True) + key
        self._room[begin - len(head) : begin] = head
        whole = size >> 3
        words = np.frombuffer(view, np.uint64, whole)
        np.bitwise_xor(words, _word(key), self._words[begin >> 3 : (begin >> 3) + whole])
        if size & 7:
            tail = self._room[begin + 8 * whole : begin + size]
            tail[:] = view[8 * whole :]
            _mask_few(tail, key)
        return self._room[begin - len(head) : begin + size]

    def _small(self, kind: int, body: bytes) -> bytes:
        if not self._masks:
            return _head_of(kind, len(body), masked=False) + body
        key, copy = os.urandom(4), bytearray(body)
        mask(memoryview(copy), key, 0)
        return _head_of(kind, len(body), masked=True) + key + copy

    def farewell(self) -> bytes:
        """The frame that ends a WebSocket."""
        return self._small(_CLOSE, _NORMAL)


def _head_of(kind: int, size: int, *, masked: bool) -> bytes:
    bit = 128 if masked else 0
    if size < 126:
        return struct.pack(">BB", 128 | kind, bit | size)
    if size < 1 << 16:
        return struct.pack(">BBH", 128 | kind, bit | 126, size)
    return struct.pack(">BBQ", 128 | kind, bit | 127, size)


def mask(view: memoryview, key: bytes, at: int) -> None:
    """Mask or unmask bytes where they are; `at` is the place of the first one in its message."""
    if at & 3:
        key = key[at & 3 :] + key[: at & 3]
    size = len(view)
    if size < 64:
        _mask_few(view, key)
        return
    words = np.frombuffer(view, np.uint64, size >> 3)
    if size >= _FIX and not words.flags.aligned:  # to mask words that do not lie as the machine likes it takes longer
        before = -words.__array_interface__["data"][0] & 7
        _mask_few(view[:before], key)
        mask(view[before:], key, before)
        return
    np.bitwise_xor(words, _word(key), words)
    if size & 7:
        _mask_few(view[size & -8 :], key)


def _word(key: bytes) -> np.uint64:
    return np.uint64(int.from_bytes(key + key, sys.byteorder))


def _mask_few(view: memoryview, key: bytes) -> None:
    size = len(view)
    number = int.from_bytes(view, "little") ^ int.from_bytes((key * 16)[:size], "little")
    view[:] = number.to_bytes(size, "little")
