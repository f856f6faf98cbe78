"""Functions for the processes of `tests/bench/test_turn_process.py`."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from distributed_training.bench.turn_worker import Orders
from distributed_training.runtime.errors import ConfigError
from distributed_training.runtime.world import read_world


def counting(orders: Orders, *, start: int) -> None:
    """Adds up what it is told."""
    (orders.folder / "own").write_text("a file of its own")
    orders.ready(folder=str(orders.folder))
    for order in orders:
        start += order["more"]
        orders.answer(total=start)


def refusing(orders: Orders) -> None:
    raise ConfigError("this cannot be done here")


def dying(orders: Orders) -> None:
    sys.stderr.write("the disk is full\n")
    sys.stderr.flush()
    os._exit(3)


def hanging(orders: Orders) -> None:
    time.sleep(600)


def ranks(orders: Orders, *, bad: int = -1) -> None:
    """One of several, which answer differently; perhaps one of them cannot be set up, and the others wait for it."""
    rank = read_world().rank
    if rank == bad:
        raise ConfigError(f"rank {rank} cannot do this")
    if bad >= 0:
        time.sleep(600)
    orders.ready(rank=rank)
    for order in orders:
        orders.answer(found=rank * order["factor"], free_bytes=rank, folder=str(orders.folder))


def interrupting(orders: Orders) -> None:
    """Its turn is when the user presses Ctrl-C."""
    orders.ready(pid=os.getpid())
    orders.wait()
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(600)


def large(orders: Orders, *, name: str) -> None:
    """Claims to leave no room on a GPU."""
    orders.ready(reserved_bytes=100.0, free_bytes=10.0, pid=os.getpid())
    for _ in orders:
        orders.answer(reserved_bytes=100.0, free_bytes=10.0, pid=os.getpid())


def forked(*, number: int) -> dict[str, Any]:
    if number < 0:
        raise ValueError("below zero")
    return {"square": number**2, "pid": os.getpid()}
