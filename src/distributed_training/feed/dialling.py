"""The way to a peer that listens: through a proxy if there is one, TLS, WebSocket, as its link says."""

from __future__ import annotations

import base64
import socket
import ssl
import time
from contextlib import suppress
from urllib.parse import unquote, urlsplit

from distributed_training.config.proxies import proxy_for
from distributed_training.feed.channel import Channel, dial
from distributed_training.feed.http_upgrade import (
    GUEST_CALLS,
    MOST_HEAD,
    LostError,
    RefusedError,
    parse_head,
    request_upgrade,
)
from distributed_training.feed.pairing import PairingLink, is_loopback
from distributed_training.feed.tls import check_fingerprint, client_context
from distributed_training.feed.websocket import WebSocketError
from distributed_training.runtime.errors import FeedError

_PROXY_PORT = 8080


def open_link(link: PairingLink, timeout: float, *, ca_file: str = "", own: str = GUEST_CALLS) -> tuple[Channel, bytes]:
    """A channel on which the protocol can begin, and what binds the proof of the token to its certificate.

    `own` says which side dials. RefusedError where that makes no sense to try again, LostError where it does.
    """
    deadline = time.monotonic() + timeout
    try:
        channel = connect(link, timeout, ca_file=ca_file)
    except OSError as error:
        raise LostError(f"{link.address} cannot be reached: {error.strerror or error}") from None
    try:
        binding = secure(channel, link, deadline)
        if link.carrier == "ws":
            request_upgrade(channel, link, deadline, own)
        return channel, binding
    except ssl.SSLCertVerificationError as error:
        channel.close()
        raise RefusedError(untrusted(link, error)) from None
    except WebSocketError as error:
        channel.close()
        raise RefusedError(f"what listens at {link.address} does not speak HTTP: {error}; see the link") from None
    except OSError as error:
        channel.close()
        raise LostError(f"{link.address}: {error}") from None
    except BaseException:
        channel.close()
        raise


def connect(link: PairingLink, timeout: float, *, address: str | None = None, ca_file: str = "") -> Channel:
    """Reach the peer, or what stands before it; nothing is said yet. `address` is one of its name, looked up before.

    OSError; LostError or RefusedError where it is a proxy that says no.
    """
    tls = context_for(link, ca_file)
    name = link.host if link.by_authorities else None
    proxy = proxy_of(link)
    if proxy is None:
        return dial(address or link.host, link.port, timeout, tls, name)
    sock = _through(proxy, link, timeout)
    try:
        return Channel(sock, tls, name=name)
    except BaseException:
        sock.close()
        raise


def proxy_of(link: PairingLink) -> str | None:
    """The proxy on the way to a peer. Only WebSockets go through one, and this machine is reached without."""
    return proxy_for(link.host) if link.carrier == "ws" and not is_loopback(link.host) else None


def secure(channel: Channel, link: PairingLink, deadline: float) -> bytes:
    """Shake hands in TLS; what binds the proof of the token to the certificate. Of a tunnel's certificate that is
    nothing: the other end of the conversation never sees it."""
    if not link.encrypted:
        return b""
    certificate = channel.shake_hands(deadline)
    return b"" if link.by_authorities else check_fingerprint(certificate, link.fingerprint, link.address)


def context_for(link: PairingLink, ca_file: str = "") -> ssl.SSLContext | None:
    """How TLS is spoken with a peer; None where it is not."""
    if not link.encrypted:
        return None
    if not link.by_authorities:
        return client_context()
    try:
        return ssl.create_default_context(cafile=ca_file or None)
    except (OSError, ssl.SSLError) as error:
        raise RefusedError(f"feed.ca_file={ca_file}: no certificates can be read from it: {error}") from None


def untrusted(link: PairingLink, error: ssl.SSLCertVerificationError) -> str:
    """What it means that a tunnel's certificate does not pass, and what to do."""
    return (
        f"the certificate of {link.address} is not trusted ({error.verify_message}): see whether the host is right and "
        "this machine's clock, too; if the authority is one of your own, name its file by feed.ca_file=FILE"
    )


# -- through a proxy


def _through(proxy: str, link: PairingLink, timeout: float) -> socket.socket:
    """A socket that an HTTP proxy has connected to the peer (CONNECT)."""
    deadline = time.monotonic() + timeout
    try:
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        host, port = parts.hostname, parts.port or _PROXY_PORT
    except ValueError:
        host = None
        parts = urlsplit("")
    if parts.scheme != "http" or host is None:
        kind = parts.scheme or "unknown"
        raise RefusedError(
            f"the proxy of the environment is one of kind {kind}; only http:// proxies are used here: set HTTPS_PROXY "
            f"to one, or NO_PROXY={link.host} to do without"
        )
    try:
        sock = socket.create_connection((host, port), timeout=timeout)
    except OSError as error:
        raise LostError(f"the proxy {host}:{port} (HTTPS_PROXY) cannot be reached: {error.strerror or error}") from None
    try:
        lines = [f"CONNECT {link.address} HTTP/1.1", f"Host: {link.address}"]
        if parts.username is not None:
            known = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            lines.append(f"Proxy-Authorization: Basic {base64.b64encode(known.encode()).decode()}")
        sock.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
        _heard(sock, f"the proxy {host}:{port}", link, deadline)
    except BaseException:
        with suppress(OSError):
            sock.close()
        raise
    return sock


def _heard(sock: socket.socket, proxy: str, link: PairingLink, deadline: float) -> None:
    """Read the proxy's answer, and nothing that comes after it."""
    data = b""
    while not data.endswith(b"\r\n\r\n"):
        sock.settimeout(max(0.01, deadline - time.monotonic()))
        byte = sock.recv(1)
        if not byte or len(data) > MOST_HEAD:
            raise LostError(f"{proxy} ended the connection instead of connecting it to {link.address}")
        data += byte
    status = parse_head(data[:-4]).status
    if status != 200:
        raise _no(status, proxy, link)


def _no(status: int, proxy: str, link: PairingLink) -> FeedError:
    if status == 407:
        return RefusedError(f"{proxy} wants a password: set HTTPS_PROXY=http://USER:PASSWORD@HOST:PORT")
    if status >= 500 or status == 429:
        return LostError(f"{proxy} cannot reach {link.address} (HTTP {status})")
    return RefusedError(
        f"{proxy} does not connect to {link.address} (HTTP {status}): have it allowed there, or set "
        f"NO_PROXY={link.host} if this machine reaches it without the proxy"
    )
