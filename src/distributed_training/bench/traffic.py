"""Bytes that this process has sent over TCP, as its system counts them: no rights needed, nothing slowed down.

Every connection knows what it has sent (`TCP_INFO`), so the difference between two looks is the traffic between them:
that of Gloo, of Horovod over Gloo, and of MPI or NCCL where they are told to use sockets.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import sys

from distributed_training.runtime.errors import BenchError

_ACKNOWLEDGED = 120  # offset of tcpi_bytes_acked in struct tcp_info: a part of Linux's interface since 4.1
_LENGTH = 128


def sent_bytes() -> dict[int, int]:
    """Bytes sent and acknowledged so far, by connection (its inode, which no later connection shares)."""
    if not sys.platform.startswith("linux"):
        raise BenchError("bytes on the wire are read from the connections by TCP_INFO, which only Linux has")
    sent = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found = os.stat(int(name))
            if not stat.S_ISSOCK(found.st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                    facts = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LENGTH)
                    sent[found.st_ino] = struct.unpack_from("Q", facts, _ACKNOWLEDGED)[0]
        except OSError:  # closed in between, or not connected
            continue
    return sent


def difference(before: dict[int, int], after: dict[int, int]) -> int:
    """Bytes sent between two looks."""
    return sum(max(0, count - before.get(connection, 0)) for connection, count in after.items())
