"""Two ends of a connection in one test."""

from __future__ import annotations

import time

from distributed_training.feed.channel import Channel


def carry(sender: Channel, receiver: Channel, size: int, most: int) -> bytes:
    """What arrives of what the sender has to send, read in pieces of up to so many bytes."""
    got, end = bytearray(), time.monotonic() + 60
    buffer = memoryview(bytearray(most))
    while len(got) < size:
        assert time.monotonic() < end
        sender.flush()
        count = receiver.receive_into(buffer)
        if count is None:
            receiver.wait(0.01)
        else:
            assert count
            got += buffer[:count]
    return bytes(got)
