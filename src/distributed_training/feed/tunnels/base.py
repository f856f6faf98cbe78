"""What a tunnel is: a way from a public address to a port of this machine, started, watched and ended by us."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from urllib.parse import urlsplit

from distributed_training.feed.pairing import PairingLink, is_loopback
from distributed_training.runtime.errors import ConfigError, FeedError

_PORTS = {"https": 443, "wss": 443, "http": 80, "ws": 80}
STARTING = 60.0
"""Seconds that a tunnel has to come up."""


class TunnelError(FeedError):
    """A tunnel cannot be opened: program or account missing, refused, or not up in time. Says what to do next."""


@dataclass(frozen=True)
class PublicAddress:
    """Where a tunnel comes out.

    A `raw` one passes bytes on as they are: what goes through it has TLS of our own. Any other one speaks HTTP and ends
    the TLS of its own name, so that WebSockets travel through it.
    """

    host: str
    port: int
    path: str = "/"
    raw: bool = False
    secure: bool = True
    """Whether its own TLS is around what passes. Off this machine always."""

    @classmethod
    def parse(cls, url: str) -> PublicAddress:
        """From `https://name/path`, `wss://name:port` or `tcp://host:port`."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            raise ConfigError(
                f"{url} is no address of a tunnel; it looks like https://name or tcp://host:port"
            ) from None
        if host is None or parts.username or (parts.scheme == "tcp" and port is None):
            raise ConfigError(f"{url} is no address of a tunnel; it looks like https://name or tcp://host:port")
        if parts.scheme == "tcp":
            return cls(host, port or 0, raw=True)
        if parts.scheme not in _PORTS:
            raise ConfigError(f"{url}: a tunnel's address begins with https://, wss:// or tcp://")
        if parts.scheme in ("http", "ws") and not is_loopback(host):
            raise ConfigError(
                f"{url} would carry batches and weights in the open; give its https:// address, which every HTTP "
                "tunnel has"
            )
        secure = parts.scheme in ("https", "wss")
        return cls(host, port or _PORTS[parts.scheme], parts.path or "/", secure=secure)

    def link(self, token: bytes, fingerprint: str | None) -> PairingLink:
        """What loaders are given. A raw tunnel needs the fingerprint of the server's own certificate."""
        if self.raw:
            return PairingLink(self.host, self.port, token, fingerprint)
        secure = self.secure if is_loopback(self.host) else None
        return PairingLink(self.host, self.port, token, carrier="ws", path=self.path, secure=secure)


class Tunnel(ABC):
    """One way to make a tunnel. One thread at a time calls it, but for `close`, which ends a `start` under way."""

    name: str
    """As users write it."""
    raw = False
    """Whether it passes on bytes, not HTTP: known before it is started, since the server then needs a certificate."""

    @abstractmethod
    def start(self, port: int) -> PublicAddress:
        """Lead a public address to a port of this machine; returns when it does, within `STARTING` seconds.

        Raises TunnelError. May be called again after `close`, and then give another address.
        """

    @abstractmethod
    def trouble(self) -> str:
        """Nothing while the tunnel is up, else what has happened to it. Quick: it is asked about once a second."""

    @abstractmethod
    def close(self) -> None:
        """End it, and the processes that it is made of. Safe to call twice, and before `start`."""

    @property
    def hint(self) -> str:
        """A line for people who are given this tunnel's link, if there is something to know."""
        return ""
