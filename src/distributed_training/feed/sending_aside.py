"""Bytes that the C library sends, in a thread of its own, which never needs the interpreter (POSIX aio).

A Python thread that sends has to have the interpreter after each call, and the thread that loads gives it up for that
again and again. Here loading goes on undisturbed; it has only to look, now and then, how much has gone.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import time
from collections import deque
from typing import Any, NamedTuple

import numpy as np

_NOBODY = 1  # SIGEV_NONE: whom to tell when it is done
_LARGE = 64 << 10  # smaller pieces are sent together: each request has its price


class _Request(ctypes.Structure):
    """`struct aiocb` of aio.h, and more room than any C library takes for what it keeps behind that."""

    _fields_ = (
        ("file", ctypes.c_int),
        ("operation", ctypes.c_int),
        ("priority", ctypes.c_int),
        ("memory", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
        ("told_value", ctypes.c_void_p),
        ("told_signal", ctypes.c_int),
        ("told_how", ctypes.c_int),
        ("told_rest", ctypes.c_char * 48),
        ("own", ctypes.c_char * 256),
    )


class _Library(NamedTuple):
    write: Any
    state: Any
    result: Any
    wait: Any


@functools.cache
def _library() -> _Library | None:
    """The calls; None where there are none. Only the one that waits gives the interpreter to others."""
    for name in (None, "librt.so.1"):  # glibc before 2.34 has them apart
        try:
            quick, slow = ctypes.PyDLL(name), ctypes.CDLL(name)
            found = _Library(quick.aio_write, quick.aio_error, quick.aio_return, slow.aio_suspend)
        except (OSError, AttributeError):
            continue
        found.write.argtypes = found.state.argtypes = found.result.argtypes = (ctypes.c_void_p,)
        found.wait.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
        found.result.restype = ctypes.c_ssize_t
        return found
    return None


def can_send_aside() -> bool:
    """Whether the C library of this system can do it."""
    return _library() is not None


class SendingAside:
    """What is on its way into one socket, which has to be one that waits. Requests are carried out in their order.

    Used by one thread at a time; `wait` by any.
    """

    def __init__(self, number: int) -> None:
        library = _library()
        assert library is not None
        self._library, self._number = library, number
        self._requests: deque[tuple[_Request, memoryview]] = deque()  # with the memory, which has to stay meanwhile
        self._error = 0
        self.size = 0
        """Bytes that are on their way."""

    @property
    def busy(self) -> bool:
        """Whether anything is."""
        return bool(self._requests)

    def send(self, views: list[memoryview]) -> None:
        """Have these sent. Their bytes may not change until they are."""
        small: list[memoryview] = []
        for view in views:
            if len(view) < _LARGE:
                small.append(view)
                continue
            if small:
                self._send(memoryview(b"".join(small)))
                small = []
            self._send(view)
        if small:
            self._send(memoryview(b"".join(small)))

    def _send(self, view: memoryview) -> None:
        if not len(view):
            return
        address, _ = np.frombuffer(view, np.uint8).__array_interface__["data"]
        request = _Request(file=self._number, memory=address, size=len(view), told_how=_NOBODY)
        if self._library.write(ctypes.addressof(request)):
            self._error = errno.EAGAIN  # for good: nobody knows any more how much of what was to be sent is on its way
            raise OSError(errno.EAGAIN, "the system takes no more requests to send")
        self._requests.append((request, view))
        self.size += len(view)

    def gone(self) -> int:
        """Bytes that went since this was asked last. OSError, from then on, where the connection broke."""
        total = self._look()
        if self._error:
            raise OSError(self._error, os.strerror(self._error))
        return total

    def _look(self) -> int:
        total = 0
        while self._requests:
            request, view = self._requests[0]
            error = self._library.state(ctypes.addressof(request))
            if error == errno.EINPROGRESS:
                break
            sent = self._library.result(ctypes.addressof(request))
            self._requests.popleft()
            self.size -= len(view)
            total += max(0, sent)
            if sent != len(view):  # a socket that waits takes all, unless its connection breaks meanwhile
                self._error = self._error or error or errno.ECONNRESET
        return total

    def wait(self, seconds: float) -> bool:
        """Until the first request of those on their way is done, or time is over. False where there is none."""
        try:
            request, _ = self._requests[0]
        except IndexError:
            return False
        whole, part = divmod(max(0.0, seconds), 1.0)
        requests = (ctypes.c_void_p * 1)(ctypes.addressof(request))
        limit = (ctypes.c_long * 2)(int(whole), int(part * 1e9))
        self._library.wait(requests, 1, limit)
        return True

    def end(self, seconds: float) -> bool:
        """Wait until nothing is on its way any more, from a socket that was shut down. Where that fails nobody knows
        when its memory is free again, so it is kept for good, and the socket must not be closed."""
        deadline = time.monotonic() + seconds
        self._look()
        while self.busy:
            if time.monotonic() >= deadline:
                _STUCK.append(self)
                return False
            self.wait(0.1)
            self._look()
        return True


_STUCK: list[SendingAside] = []
