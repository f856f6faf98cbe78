"""Bytes that lie in many places go into a socket by one call. Python's own wants a view of each place; here NumPy
makes the list of them, so that a place costs what it costs the system and no more."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from collections.abc import Sequence

import numpy as np

from distributed_training.wire.batches import Sendable

_MOST = 1024  # places of one call: the system's limit
_QUIETLY = int(socket.MSG_NOSIGNAL)  # as Python does: a broken connection is an error, not a signal


class _Message(ctypes.Structure):
    """`struct msghdr` of sys/socket.h."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint32),
        ("places", ctypes.c_void_p),
        ("places_count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


_sendmsg = ctypes.CDLL(None, use_errno=True).sendmsg
_sendmsg.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
_sendmsg.restype = ctypes.c_ssize_t


def send_scattered(number: int, parts: Sequence[Sendable], skipped: int, flags: int) -> tuple[int, int]:
    """Send these on socket `number` but for `skipped` bytes at the front, as much as one call takes.

    (bytes sent, bytes that were to be sent); raises what `socket.sendmsg` would.
    """
    found: list[np.ndarray] = []
    count = 0
    for part in parts:
        found.append(_view_span(part, skipped) if isinstance(part, memoryview) else part.spans(skipped))
        skipped = 0
        count += len(found[-1])
        if count >= _MOST:
            break
    places = np.concatenate(found)[:_MOST]
    message = _Message(places=places.ctypes.data, places_count=len(places))
    while (sent := _sendmsg(number, ctypes.byref(message), flags | _QUIETLY)) < 0:
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return sent, int(places[:, 1].sum())


def _view_span(view: memoryview, skipped: int) -> np.ndarray:
    address, _ = np.frombuffer(view, np.uint8).__array_interface__["data"]
    return np.array([[address + skipped, len(view) - skipped]], np.uintp)
