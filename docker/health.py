"""Is a container at work? Code 0 if this machine listens at a TCP port, or has a connection to one.

health.py listening 29500      a GPU side waits for loaders or trains with them
health.py connected 29500      a loader is connected to its GPU side
health.py answers 6006         an HTTP server answers there

The first two look at the kernel's tables: a connection to a GPU side would count there as a stranger's, and be logged.
"""

from __future__ import annotations

import sys
import urllib.request
from pathlib import Path

LISTENING, ESTABLISHED = "0A", "01"
TABLES = ("/proc/net/tcp", "/proc/net/tcp6")


def rows() -> list[list[str]]:
    """(local address, remote address, state) of every socket of this network namespace; addresses are in hex."""
    lines = [line for table in TABLES if Path(table).exists() for line in Path(table).read_text().splitlines()[1:]]
    return [line.split()[1:4] for line in lines]


def healthy(what: str, port: int) -> bool:
    """Whether it is so."""
    end = f":{port:04X}"
    if what == "listening":
        return any(local.endswith(end) and state == LISTENING for local, _, state in rows())
    if what == "connected":
        return any(remote.endswith(end) and state == ESTABLISHED for _, remote, state in rows())
    if what == "answers":
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5) as answer:
            return bool(answer.status == 200)
    raise SystemExit(f"{what}: listening, connected or answers")


if __name__ == "__main__":
    sys.exit(0 if healthy(sys.argv[1], int(sys.argv[2])) else 1)
