"""The pairing link: one string that says where the GPU side is and how to prove that one belongs to its run.

dtrain://TOKEN@host:port?fp=SHA256        off this machine: token and certificate
dtrain://127.0.0.1:port                   on this machine neither is needed
dtrain+ws://TOKEN@host:port/path          through a tunnel or an HTTP proxy: WebSocket messages inside the tunnel's TLS
wss://host/path, https://host/path        the same for an address that a tunnel gives; the token is given apart

A `+ws` link needs no fingerprint: its TLS ends at the tunnel, whose certificate the system's authorities vouch for, and
the token proves both ends. With one (`?fp=`), it is the GPU side's own certificate, as without `+ws`. On this machine
there is no TLS, unless the link says `+wss`.

The ranks of a job have a link each; separated by commas they are one string, too.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import secrets
import socket
from dataclasses import dataclass
from typing import Literal
from urllib.parse import parse_qsl, urlsplit

from distributed_training.runtime.errors import ConfigError

SCHEME = "dtrain"
TOKEN_BYTES = 24
WEB_PORT = 443
"""The port of https: what listens there is a tunnel or a web server, so a link to it is one of WebSocket."""
_CARRIERS: dict[str, tuple[Literal["tcp", "ws"], bool | None]] = {
    SCHEME: ("tcp", None),
    f"{SCHEME}+ws": ("ws", None),
    f"{SCHEME}+wss": ("ws", True),
    "wss": ("ws", True),
    "https": ("ws", True),
    "ws": ("ws", None),
}
"""Scheme of a link -> its carrier, and whether it is surely inside TLS."""


@dataclass(frozen=True)
class PairingLink:
    """Address, token and fingerprint of a GPU side. `str(link)` holds the secret, `repr(link)` does not."""

    host: str
    port: int
    token: bytes | None = None
    fingerprint: str | None = None
    carrier: Literal["tcp", "ws"] = "tcp"
    """What the frames travel in: a plain stream, or WebSocket messages."""
    path: str = "/"
    """Of a WebSocket: what stands behind host and port in the tunnel's address."""
    secure: bool | None = None
    """Whether it is inside TLS; None where the host decides: always, unless it is this machine."""

    def __post_init__(self) -> None:
        if not self.host or not 0 < self.port < 65536:
            raise ConfigError(f"{self.host}:{self.port} is no address; a pairing link needs a host and a port")
        if not is_loopback(self.host) and self.token is None:
            raise ConfigError(
                f"{self.host} is not this machine, and the link to it has not a token; take the whole pairing link "
                "that the GPU side prints, or give the token as well (network.token_file, or token= in Python)"
            )
        if self.secure is False and not is_loopback(self.host):
            raise ConfigError(f"{self.host} is not this machine: a connection to it has to be inside TLS")
        if not self.path.startswith("/") or not self.path.isascii() or not self.path.isprintable() or " " in self.path:
            raise ConfigError(f"{self.path!r} is no path of an address; it begins with / and has no spaces")

    @property
    def encrypted(self) -> bool:
        """Whether the connection is one of TLS. Without a fingerprint it is the token that proves who answers."""
        if self.secure is not None and self.carrier == "ws":
            return self.secure or self.fingerprint is not None
        return self.fingerprint is not None or not is_loopback(self.host)

    @property
    def by_authorities(self) -> bool:
        """Whether the certificate is one that authorities vouch for, a tunnel's, and not the other side's own."""
        return self.carrier == "ws" and self.encrypted and self.fingerprint is None

    @property
    def address(self) -> str:
        """Host and port, for messages."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return self._text("" if self.token is None else f"{encode_token(self.token)}@")

    def without_token(self) -> str:
        """The link for somebody who knows the secret already: may be shown to anybody."""
        return self._text("")

    def _text(self, token: str) -> str:
        query = "" if self.fingerprint is None else f"?fp={self.fingerprint}"
        scheme = SCHEME if self.carrier == "tcp" else f"{SCHEME}+wss" if self.secure else f"{SCHEME}+ws"
        return f"{scheme}://{token}{self.address}{self.path if self.path != '/' else ''}{query}"

    def __repr__(self) -> str:
        return f"PairingLink({self.address}, token {'not needed' if self.token is None else 'hidden'})"

    @classmethod
    def parse(cls, text: str, token: bytes | None = None) -> PairingLink:
        """Read a link, an address that a tunnel gives, or a plain host:port on this machine.

        `token` is for a text that does not hold one.
        """
        whole = text.strip()
        if "://" not in whole:
            whole = f"{SCHEME}://{whole}"
        try:
            parts = urlsplit(whole)
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
            parts = urlsplit("")
        carrier, secure = _CARRIERS.get(parts.scheme, ("", None))
        port = port or (WEB_PORT if carrier == "ws" else None)
        query = dict(parse_qsl(parts.query))
        path = parts.path or "/"
        if not carrier or host is None or port is None or (carrier == "tcp" and path != "/") or query.keys() - {"fp"}:
            raise ConfigError(
                f"{_hidden(text)} is no pairing link; it looks like {SCHEME}://TOKEN@host:port?fp=FINGERPRINT or "
                f"{SCHEME}+ws://TOKEN@host:port and is printed by the GPU side"
            )
        if parts.scheme == "ws" and not is_loopback(host):
            raise ConfigError(f"{_hidden(text)}: off this machine a WebSocket has to be inside TLS; use wss://{host}")
        fingerprint, given = query.get("fp"), parts.username
        if carrier == "tcp" and fingerprint is None and given is not None and not is_loopback(host):
            raise ConfigError(
                f"{host} is not this machine, and the link to it has not a certificate's fingerprint; take the whole "
                "pairing link that the GPU side prints"
            )
        if fingerprint is not None and (len(fingerprint) != 64 or set(fingerprint) - set("0123456789abcdef")):
            raise ConfigError(f"the fingerprint in {_hidden(text)} is not whole; copy the whole link")
        token = token if given is None else decode_token(given)
        secure = secure if is_loopback(host) else None  # elsewhere that goes without saying
        return cls(host, port, token, fingerprint, "tcp" if carrier == "tcp" else "ws", path, secure)


def parse_links(text: str, token: bytes | None = None) -> list[PairingLink]:
    """The links of all ranks of a job from one string; `token` is for those that do not hold one."""
    parts = [part for part in text.split(",") if part.strip()]
    return [PairingLink.parse(part, token) for part in parts or [text]]


def new_token() -> bytes:
    """A secret for one run."""
    return secrets.token_bytes(TOKEN_BYTES)


def encode_token(token: bytes) -> str:
    """A token as text that can stand in a link."""
    return base64.urlsafe_b64encode(token).decode().rstrip("=")


def decode_token(text: str) -> bytes:
    """The token that `encode_token` wrote."""
    try:
        token = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise ConfigError("the token in the pairing link is damaged; copy the whole link") from None
    if len(token) < 16:
        raise ConfigError("the token in the pairing link is too short; copy the whole link")
    return token


def is_loopback(host: str) -> bool:
    """Whether a name or address means this machine and cannot be reached from another one."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def addresses_of(host: str) -> set[str]:
    """All addresses of a name."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise ConfigError(f"{host}: the name cannot be resolved ({error.strerror}); give an address instead") from None
    return {plain_address(str(entry[4][0])) for entry in found}


def plain_address(text: str) -> str:
    """An address in one form: IPv4 in an IPv6 disguise is IPv4."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return text
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


def _hidden(text: str) -> str:
    """A link without its secret, for messages."""
    before, at, after = text.partition("@")
    return repr(f"{SCHEME}://...@{after}" if at else before)
