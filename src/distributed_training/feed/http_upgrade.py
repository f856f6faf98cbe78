"""The HTTP handshake that opens a WebSocket, for both ends, and what the answers of tunnels and proxies mean.

A request that a browser makes is refused (it always says its `Origin`): else any web page that is open on this machine
could talk to a GPU side that listens here without a token.
"""

from __future__ import annotations

import base64
import hashlib
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distributed_training._version import __version__
from distributed_training.feed.websocket import WebSocket, WebSocketError
from distributed_training.runtime.errors import FeedError

if TYPE_CHECKING:
    from distributed_training.feed.channel import Channel
    from distributed_training.feed.pairing import PairingLink

GUEST_CALLS, SERVER_CALLS = "dtrain.guest.1", "dtrain.server.1"
"""The subprotocols: who opens the connection, a loader, client or doctor, or the GPU side."""
MOST_HEAD = 8 << 10
"""Bytes that the head of a request or answer may have."""
_MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_PIECE = 2048
_TEXTS = {
    101: "Switching Protocols", 400: "Bad Request", 403: "Forbidden", 409: "Conflict", 426: "Upgrade Required",
    431: "Request Header Fields Too Large",
}  # fmt: skip


class RefusedError(FeedError):
    """The other side does not take this one, and will not change its mind."""


class LostError(FeedError):
    """The connection is gone; another one may do better."""


@dataclass
class Head:
    """What stands before the body of a request or answer."""

    first: str
    fields: dict[str, str] = field(default_factory=dict)
    """Names in lower case. Of several fields with one name all values, separated by commas."""
    rest: bytes = b""
    """What came behind it."""

    @property
    def status(self) -> int:
        """The number of an answer; 0 where it is none."""
        words = self.first.split()
        known = len(words) > 1 and words[0].startswith("HTTP/1.") and words[1].isdigit()
        return int(words[1][:3]) if known else 0

    def has(self, name: str, word: str) -> bool:
        """Whether a field is a list that has this word."""
        return word in {part.strip().lower() for part in self.fields.get(name, "").split(",")}


def read_head(channel: Channel, deadline: float, ahead: bytes = b"") -> Head:
    """The head of a request or answer, by this time. WebSocketError where it is none or too long, TimeoutError."""
    data, buffer = bytearray(ahead), memoryview(bytearray(_PIECE))
    while (end := data.find(b"\r\n\r\n")) < 0:
        if len(data) > MOST_HEAD:
            raise WebSocketError(f"an HTTP head of more than {MOST_HEAD} bytes")
        size = channel.receive_into(buffer)
        if size is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{channel.peer} did not finish the HTTP handshake in time")
            channel.wait(deadline - time.monotonic())
        elif size == 0:
            raise ConnectionResetError(f"{channel.peer} ended the connection in the middle of the HTTP handshake")
        else:
            data += buffer[:size]
    return parse_head(bytes(data[:end]), bytes(data[end + 4 :]))


def parse_head(data: bytes, rest: bytes = b"") -> Head:
    """Read a head without the empty line at its end."""
    if len(data) > MOST_HEAD:
        raise WebSocketError(f"an HTTP head of {len(data)} bytes; {MOST_HEAD} are allowed")
    first, *lines = data.decode("latin-1").split("\r\n")
    head = Head(first, rest=rest)
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise WebSocketError("an HTTP head with a line that is no field")
        known = head.fields.get(name.lower())
        head.fields[name.lower()] = value.strip() if known is None else f"{known}, {value.strip()}"
    return head


# -- the side that listens


def answer_upgrade(channel: Channel, deadline: float, ahead: bytes, expected: str) -> None:
    """Make a WebSocket of a connection whose first bytes are those of an HTTP request.

    WebSocketError where it is not what is `expected`, one of the subprotocols; the caller is told so before.
    """
    try:
        head = read_head(channel, deadline, ahead)
    except WebSocketError:
        _say(channel, 431, "too long, or no HTTP")
        raise
    status, text = _judge(head, expected)
    if status != 101:
        _say(channel, status, text)
        raise WebSocketError(f"an HTTP request that cannot be served ({status}): {text}")
    fields = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Protocol": expected}
    fields["Sec-WebSocket-Accept"] = _accept(head.fields["sec-websocket-key"])
    channel.queue([memoryview(_head_text(f"HTTP/1.1 101 {_TEXTS[101]}", fields))])
    _send_all(channel, deadline)
    channel.wrap(WebSocket(serves=True, ahead=head.rest))


def _judge(head: Head, expected: str) -> tuple[int, str]:
    words, fields = head.first.split(), head.fields
    if len(words) != 3 or words[0] != "GET" or words[2] != "HTTP/1.1":
        return 400, "only WebSocket requests are served here"
    if not head.has("upgrade", "websocket") or not head.has("connection", "upgrade"):
        return 426, "this is one end of a distributed training: give its pairing link to dtrain, not to a browser"
    if "origin" in fields:
        return 403, "web pages may not connect to a distributed training"
    if fields.get("sec-websocket-version") != "13" or len(fields.get("sec-websocket-key", "")) != 24:
        return 400, "a WebSocket of version 13 is needed"
    if not head.has("sec-websocket-protocol", expected):
        if head.has("sec-websocket-protocol", GUEST_CALLS) or head.has("sec-websocket-protocol", SERVER_CALLS):
            return 409, "both ends are on the same side"
        return 400, f"the subprotocol {expected} is needed"
    return 101, ""


def _say(channel: Channel, status: int, text: str) -> None:
    """Answer a request that is not served. It need not be heard."""
    body = f"{text}\n".encode()
    fields = {"Content-Type": "text/plain", "Content-Length": str(len(body)), "Connection": "close"}
    if status == 426:
        fields["Upgrade"] = "websocket"
    channel.queue([memoryview(_head_text(f"HTTP/1.1 {status} {_TEXTS[status]}", fields) + body)])
    channel.flush()


# -- the side that dials


def request_upgrade(channel: Channel, link: PairingLink, deadline: float, own: str) -> None:
    """Make a WebSocket of a connection that this side has opened. `own` is its subprotocol.

    LostError, RefusedError: what listens there says no; the text says what that means and what to do.
    """
    key = base64.b64encode(os.urandom(16)).decode()
    usual = link.port == (443 if link.encrypted else 80)
    fields = {
        "Host": link.address.rpartition(":")[0] if usual else link.address,
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Key": key,
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Protocol": own,
        "User-Agent": f"distributed-training/{__version__}",
        "ngrok-skip-browser-warning": "1",
    }
    channel.queue([memoryview(_head_text(f"GET {link.path} HTTP/1.1", fields))])
    _send_all(channel, deadline)
    head = read_head(channel, deadline)
    if head.status != 101:
        raise refusal(head, link.address, own)
    right = head.fields.get("sec-websocket-accept") == _accept(key)
    if not right or not head.has("upgrade", "websocket") or head.fields.get("sec-websocket-protocol") != own:
        raise RefusedError(
            f"{link.address} is a WebSocket server, but no end of a distributed training; take the pairing link that "
            "the other side prints now"
        )
    channel.wrap(WebSocket(serves=False, ahead=head.rest))


def refusal(head: Head, address: str, own: str = GUEST_CALLS) -> FeedError:
    """What it means that a WebSocket was not opened, and what to do."""
    status, code = head.status, _tunnel_code(head)
    said = f"{address} answers with HTTP {status}{f' ({code})' if code else ''}"
    if status in (502, 503, 504) or status in range(520, 531):
        return LostError(
            f"{said}: the tunnel is there, but nothing answers behind it. See whether the other side still runs; if it "
            "was started again and prints another link, take that one"
        )
    if status in (404, 410):
        return LostError(
            f"{said}: the tunnel of this link has ended, or its path is wrong. See whether the other side still runs, "
            "and take the pairing link that it prints now"
        )
    if status == 409:
        where = "a loader that listens; give it to `dtrain serve --connect` (GPUTrainer.connect)"
        if own == SERVER_CALLS:
            where = "a GPU side that listens; give it to `dtrain feed --to` (CPULoader.start_loading)"
        return RefusedError(f"this link leads to {where}")
    if status == 429 or status >= 500:
        return LostError(f"{said}: too many requests, or a fault of the tunnel or proxy; it may be over soon")
    if status in (401, 403, 407):
        return RefusedError(
            f"{said}: the tunnel or proxy does not let this machine through. Allow it there (a login or access rule of "
            "the tunnel must be off for this address), then try again"
        )
    if 300 <= status < 400:
        there = "".join(letter for letter in head.fields.get("location", "")[:200] if letter.isprintable())
        return RefusedError(f"{said}: it sends everybody on to {there or 'another address'}; use that address itself")
    if status == 200:
        return RefusedError(
            f"{said}: a web page, no training. Either the tunnel shows a page of its own first (turn that off there), "
            "or the address is not that of the GPU side's tunnel; take the pairing link that it prints now"
        )
    if not status:
        return RefusedError(
            f"what listens at {address} does not speak HTTP; take the pairing link that the other side prints"
        )
    return RefusedError(f"{said}: it does not take WebSockets; take the pairing link that the other side prints now")


def _tunnel_code(head: Head) -> str:
    """The error code of a tunnel, where it names one."""
    code = head.fields.get("ngrok-error-code", "")
    if not code and (at := head.rest.find(b"ERR_NGROK_")) >= 0:
        code = head.rest[at : at + 16].decode("latin-1")
    return "".join(letter for letter in code[:40] if letter.isalnum() or letter == "_")


# -- both


def _accept(key: str) -> str:
    digest = hashlib.sha1(key.encode("latin-1") + _MAGIC, usedforsecurity=False).digest()
    return base64.b64encode(digest).decode()


def _head_text(first: str, fields: dict[str, str]) -> bytes:
    lines = [first, *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    return "\r\n".join(lines).encode("latin-1")


def _send_all(channel: Channel, deadline: float) -> None:
    channel.flush()
    while channel.pending:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{channel.peer} does not take what is sent to it")
        channel.wait(deadline - time.monotonic())
        channel.flush()
