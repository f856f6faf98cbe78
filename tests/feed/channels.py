"""Two ends of a connection in one test."""

from __future__ import annotations

import time
from collections.abc import Callable

from distributed_training.feed.channel import Channel


def carry(sender: Channel, receiver: Channel, size: int, most: int) -> bytes:
    """What arrives of what the sender has to send, read in pieces of up to so many bytes."""
    return read(receiver, size, most, sender.flush)


def read(receiver: Channel, size: int, most: int, meanwhile: Callable[[], object] = lambda: None) -> bytes:
    """So many bytes that arrive, read in pieces; `meanwhile` is called again and again."""
    got, end = bytearray(), time.monotonic() + 60
    buffer = memoryview(bytearray(most))
    while len(got) < size:
        assert time.monotonic() < end
        meanwhile()
        count = receiver.receive_into(buffer)
        if count is None:
            receiver.wait(0.01)
        else:
            assert count
            got += buffer[:count]
    return bytes(got)
