"""A thread of this process on another machine: the sockets that it opens belong to a network namespace."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

_NETWORK = 0x40000000  # CLONE_NEWNET of linux/sched.h; os.setns came with Python 3.12


def enter(name: str) -> None:
    """Move this thread into a namespace that `ip netns` made, for good."""
    _set(f"/run/netns/{name}")


@contextmanager
def inside(name: str) -> Iterator[None]:
    """This thread, and all threads that it starts here, are in the namespace."""
    here = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        enter(name)
        yield
    finally:
        _set(f"/proc/self/fd/{here}")
        os.close(here)


def _set(path: str) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(number, _NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {path}")
    finally:
        os.close(number)
