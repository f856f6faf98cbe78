"""A doctor's way to the GPU side, one step at a time, so that it shows which one fails and what would mend it."""

from __future__ import annotations

import errno
import os
import platform
import queue
import socket
import ssl
import threading
import time
from dataclasses import dataclass

from distributed_training._version import __version__
from distributed_training.data.plan import PLAN_VERSION
from distributed_training.feed.channel import Channel, dial
from distributed_training.feed.dialling import connect, untrusted
from distributed_training.feed.dialling import secure as secure_link
from distributed_training.feed.doctor.probing import LONGEST_PIECE, Talk
from distributed_training.feed.doctor.report import FaultError
from distributed_training.feed.http_upgrade import GUEST_CALLS, request_upgrade
from distributed_training.feed.pairing import PairingLink, is_loopback, plain_address
from distributed_training.feed.tls import client_context
from distributed_training.feed.websocket import WebSocketError
from distributed_training.runtime.errors import FeedError
from distributed_training.wire import (
    Authenticated,
    AuthenticationError,
    Connection,
    Lost,
    PeerError,
    Reason,
    Rejected,
    Role,
)
from distributed_training.wire.frames import MAGIC, MIN_VERSION, VERSION, Kind
from distributed_training.wire.messages import Error, Goodbye, Join, Refused, Welcome

LISTEN = "`dtrain serve` or, only to try the way, `dtrain doctor --listen`"
_NEW_LINK = "take the pairing link that the GPU side prints now, whole"
_PROXY = "the proxy is the one of HTTPS_PROXY or ALL_PROXY; NO_PROXY names hosts that are reached without"
_LOOK = 2.0  # seconds for a second look at what listens there
_SAME_RELEASE = "install the same release of distributed-training on both sides (`dtrain version`)"


@dataclass
class Visit:
    """A connection on which the doctor is welcome."""

    talk: Talk
    welcome: Welcome
    protocol: int


def find(host: str, timeout: float) -> list[str]:
    """The addresses of a name, in the order in which they are to be tried."""
    answers: queue.SimpleQueue[list[str] | OSError] = queue.SimpleQueue()

    def ask() -> None:
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            answers.put(list(dict.fromkeys(str(entry[4][0]) for entry in found)))
        except (OSError, UnicodeError) as error:
            answers.put(error if isinstance(error, OSError) else OSError(str(error)))

    threading.Thread(target=ask, name=f"name of {host}", daemon=True).start()  # the system's own patience is longer
    try:
        answer = answers.get(timeout=timeout)
    except queue.Empty:
        answer = OSError(f"no answer within {timeout:g} s")
    if isinstance(answer, OSError):
        raise FaultError(
            "name",
            f"{host}: the name cannot be resolved ({answer.strerror or answer})",
            "give the address of the GPU machine in place of its name (`hostname -I` shows it there), or add the name "
            "to the name server or to /etc/hosts on this machine",
        )
    return answer


def reach(addresses: list[str], link: PairingLink, timeout: float, ca_file: str = "") -> Channel:
    """Open a connection to one of the addresses; without one, through the proxy."""
    error: OSError = OSError("there is no address")
    port, deadline = link.port, time.monotonic() + timeout
    for at, address in enumerate(addresses or [link.host]):
        share = max(0.5, (deadline - time.monotonic()) / max(1, len(addresses) - at))
        try:
            return connect(link, share, address=address, ca_file=ca_file)
        except OSError as refusal:
            error = refusal
        except FeedError as refusal:
            raise FaultError("proxy", str(refusal), _PROXY) from None
    where = f"{', '.join(addresses)}, port {port}"
    if isinstance(error, ConnectionRefusedError):
        raise FaultError(
            "port",
            f"{where}: the machine answers, but nothing listens at this port",
            f"start the GPU side there ({LISTEN}), or take the port from the link that it prints; "
            f"`ss -ltn 'sport = :{port}'` on the GPU machine shows whether it listens, and at which address",
        )
    if isinstance(error, TimeoutError):
        raise FaultError(
            "machine",
            f"{where}: no answer within {timeout:g} s",
            f"a firewall or the cloud's security group drops what comes: allow TCP port {port} on the GPU machine; or "
            "the address is of a network that this machine cannot see: use a VPN, or a tunnel (`ssh -L`)",
        )
    if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
        raise FaultError(
            "machine",
            f"{where}: there is no way to that network ({error.strerror})",
            "take another address of the GPU machine (`hostname -I` there), or connect both to one network (VPN)",
        )
    raise FaultError("machine", f"{where}: {error.strerror or error}", "see whether the address and port are right")


def secure(channel: Channel, link: PairingLink, deadline: float) -> bytes:
    """Shake hands in TLS and compare the certificate; what binds the proof of the token to it."""
    if not link.encrypted:
        return b""
    try:
        return secure_link(channel, link, deadline)
    except ssl.SSLEOFError:
        raise _closed_at_once(channel, "tls") from None
    except ssl.SSLCertVerificationError as error:
        raise FaultError("tls", untrusted(link, error), f"mend one of these, or {_NEW_LINK}") from None
    except ssl.SSLError as error:
        raise FaultError(
            "tls",
            f"what listens at {link.address} does not speak TLS 1.3 ({error.reason or error})",
            f"another program has that port, or the run there has no certificate: {_NEW_LINK}; "
            f"`ss -ltnp 'sport = :{link.port}'` on the GPU machine shows which program it is",
        ) from None
    except TimeoutError:
        raise _silent(link, "tls") from None
    except OSError:
        raise _closed_at_once(channel, "tls") from None
    except FeedError as error:
        raise FaultError(
            "tls",
            str(error),
            f"it is another server or was started again: {_NEW_LINK}; if it is the same, somebody stands between",
        ) from None


def upgrade(channel: Channel, link: PairingLink, deadline: float) -> None:
    """Open the WebSocket of a tunnel's link."""
    try:
        request_upgrade(channel, link, deadline, GUEST_CALLS)
    except FeedError as error:
        raise FaultError("tunnel", str(error), f"see what the tunnel's own page says, or {_NEW_LINK}") from None
    except WebSocketError as error:
        raise FaultError("tunnel", f"what listens at {link.address} does not speak HTTP: {error}", _NEW_LINK) from None
    except TimeoutError:
        raise _silent(link, "tunnel") from None
    except OSError:
        raise _closed_at_once(channel, "tunnel") from None


def enter(channel: Channel, link: PairingLink, binding: bytes, deadline: float) -> Visit:
    """Prove the token and be welcome."""
    buffer = memoryview(bytearray(LONGEST_PIECE))  # what comes means nothing: each probe may overwrite the last

    def allocate(size: int, kind: Kind, stream: int) -> memoryview:
        return buffer[:size]

    connection = Connection(
        Role.DOCTOR, token=link.token, binding=binding, max_payload=LONGEST_PIECE, allocate=allocate
    )
    talk = Talk(channel, connection)
    join = Join(f"doctor {platform.node()}/{os.getpid()}", __version__, "", PLAN_VERSION, {}, (), "", LONGEST_PIECE)
    protocol, joined = 0, False
    while time.monotonic() < deadline:
        try:
            events = talk.turn(deadline)
        except PeerError as error:
            raise _no_peer(talk, link, error) from None
        except OSError:
            raise _stranger(talk, link) from None
        if talk.first and not _is_ours(talk):
            raise _stranger(talk, link)
        for event in events:
            if isinstance(event, Authenticated):
                protocol = event.version
            if isinstance(event, Welcome):
                return Visit(talk, event, protocol)
            if isinstance(event, Rejected):
                raise _rejected(event, link)
            if isinstance(event, Refused):
                raise _refused(event, link)
            if isinstance(event, Lost):
                raise _stranger(talk, link)
            if isinstance(event, (Error, Goodbye)):
                raise FaultError("welcome", f"{link.address} says: {event.text}", "look into its log")
        if connection.authenticated and not joined:
            connection.send(join)
            joined = True
    raise _silent(link, "protocol")


# -- faults


def _rejected(event: Rejected, link: PairingLink) -> FaultError:
    """A refusal before the token is proved. Whoever sent it has proved nothing either."""
    low, high = event.versions
    if event.reason is Reason.VERSION:
        return FaultError(
            "protocol",
            f"{link.address} speaks protocol versions {low} to {high}, this side {MIN_VERSION} to {VERSION}",
            _SAME_RELEASE,
        )
    texts = {
        Reason.TOKEN_NEEDED: "it needs a token, and the link has none",
        Reason.TOKEN_UNEXPECTED: "it has no token, and the link has one: the link is for another run",
        Reason.TOKEN_WRONG: "the token of the link is not that of the run there",
    }
    if event.reason in texts:
        return FaultError("token", f"{link.address}: {texts[event.reason]}", _NEW_LINK)
    return FaultError("protocol", f"{link.address} refused the connection ({event.reason.name})", _SAME_RELEASE)


def _refused(event: Refused, link: PairingLink) -> FaultError:
    if event.reason is Reason.BUSY:
        fix = "wait until the other doctor is done"
    elif event.reason is Reason.ROLE:
        fix = _SAME_RELEASE
    else:
        fix = "do as it says; its log may say more"
    return FaultError("welcome", f"{link.address} does not take doctors now: {event.text}", fix)


def _no_peer(talk: Talk, link: PairingLink, error: PeerError) -> FaultError:
    if isinstance(error, AuthenticationError):
        return FaultError("token", f"{link.address}: {error}", _NEW_LINK)
    if error.reason is Reason.VERSION:
        return FaultError("protocol", f"{link.address}: {error}", _SAME_RELEASE)
    if _is_ours(talk):
        return FaultError("protocol", f"{link.address}: {error}", _SAME_RELEASE)
    return _stranger(talk, link)


def _stranger(talk: Talk, link: PairingLink) -> FaultError:
    """It ended, or said something that is not our protocol."""
    first = talk.first
    alert = first[:2] == b"\x15\x03"
    if not link.encrypted and (alert or (not first and _speaks_tls(link))):
        return FaultError("tls", f"{link.address} wants TLS, and the link has no certificate's fingerprint", _NEW_LINK)
    if not first or _is_ours(talk):
        return _closed_at_once(talk.channel, "protocol")
    return FaultError(
        "protocol",
        f"what listens at {link.address} is no dtrain: its first bytes are {first!r}",
        f"another program has that port: choose another one on the GPU side; `ss -ltnp 'sport = :{link.port}'` there "
        "shows which program it is",
    )


def _speaks_tls(link: PairingLink) -> bool:
    """Whether what listens there answers a greeting in TLS."""
    try:
        channel = dial(link.host, link.port, _LOOK, client_context())
    except OSError:
        return False
    try:
        return bool(channel.shake_hands(time.monotonic() + _LOOK))
    except OSError:
        return False
    finally:
        channel.close()


def _is_ours(talk: Talk) -> bool:
    return bool(talk.first) and MAGIC.startswith(talk.first[: len(MAGIC)])


def _closed_at_once(channel: Channel, check: str) -> FaultError:
    own = channel.own_address
    return FaultError(
        check,
        f"{channel.peer} ended the connection at once",
        f"the log of the GPU side has a line `refused a connection from ...` that says why. Its `cpu_host` or --allow, "
        f"if given, must be the address of this machine as it sees it ({own} unless there is a NAT between); or it has "
        "too many connections already; or it is no dtrain",
    )


def _silent(link: PairingLink, check: str) -> FaultError:
    return FaultError(
        check,
        f"something listens at {link.address} but does not answer",
        "see whether the GPU side still runs and is not stopped (Ctrl-Z), or whether another program has that port: "
        f"`ss -ltnp 'sport = :{link.port}'` on the GPU machine shows it",
    )


def describe_host(host: str, addresses: list[str]) -> str:
    """A name with its addresses, for people."""
    plain = [plain_address(address) for address in addresses]
    place = " (this machine)" if all(is_loopback(address) for address in plain) else ""
    return f"{host}{place}" if plain == [host] else f"{host} is {', '.join(plain)}{place}"
