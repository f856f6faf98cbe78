"""What a trial, the service and its workers say to each other: one small msgpack map a packet, between processes of one
user on one machine.

The sockets keep packets whole (SOCK_SEQPACKET): nobody ever waits for the rest of a message. Their names lie in the
system's abstract space, so that no file is left; who is at the other end is asked of the system.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import struct
from dataclasses import asdict
from typing import Any

import msgpack
import numpy as np

from distributed_training._version import __version__
from distributed_training.config import Config
from distributed_training.runtime.errors import FeedError

MOST_IDS = 8192
"""Samples in one request: a packet has to fit into a socket's buffer."""
MOST_BYTES = 160 << 10
_IRRELEVANT = ("shuffle", "drop_last", "num_workers", "pin_memory", "augment", "device_transform")
"""Settings of `data` that change nothing in a sample as the dataset gives it."""

Message = dict[str, Any]


def new_name() -> str:
    """A name for a service that nobody guesses."""
    return f"dtrain-feed-{secrets.token_hex(16)}"


def address_of(name: str) -> str:
    """Where the service of this name is found on this machine."""
    return f"\0{name}"


def data_identity(config: Config) -> str:
    """Equal for trials whose samples are the same."""
    data = {key: value for key, value in asdict(config.data).items() if key not in _IRRELEVANT}
    return hashlib.sha256(json.dumps([__version__, data], sort_keys=True, default=str).encode()).hexdigest()[:32]


def make_socket() -> socket.socket:
    """A socket that keeps packets whole."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)


def is_own(peer: socket.socket) -> bool:
    """Whether a process of this user is at the other end."""
    _, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return bool(user == os.geteuid())


def encode(message: Message) -> bytes:
    """A message as a packet."""
    packet: bytes = msgpack.packb(message)
    return packet


def decode(packet: bytes) -> Message:
    """A packet as a message. Raises FeedError where it is none."""
    try:
        message = msgpack.unpackb(packet, max_ext_len=0)
    except Exception as error:
        raise FeedError(f"the shared feed got a packet that it cannot read ({type(error).__name__})") from None
    if not isinstance(message, dict):
        raise FeedError("the shared feed got a packet that is no message")
    return message


def numbers(raw: Any, kind: type[np.generic]) -> np.ndarray:
    """The numbers of a message."""
    if not isinstance(raw, bytes) or len(raw) % np.dtype(kind).itemsize:
        raise FeedError("the shared feed got a message whose numbers are damaged")
    return np.frombuffer(raw, kind)
