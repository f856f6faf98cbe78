"""A loader process of the shared feed: loads the samples that it is told to, and writes them into their slots."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch

from distributed_training.data.base import Dataset
from distributed_training.data.loading_process import only_loads
from distributed_training.data.torch_dataset import drew_something, fetch
from distributed_training.feed.columns import Unkept
from distributed_training.runtime.allocator import keep_freed_memory
from distributed_training.runtime.forking import garbage_stays_here
from distributed_training.runtime.signals import end_with_parent
from distributed_training.tuning.shared_feed.messages import MOST_BYTES, decode, encode, numbers
from distributed_training.tuning.shared_feed.rows import RowStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stock:
    """A dataset, and where its samples are written to."""

    dataset: Dataset
    rows: RowStore


def start_worker(stocks: Mapping[str, Stock], close_in_child: list[socket.socket]) -> tuple[int, socket.socket]:
    """Fork a worker: its process id, and the socket that it takes its tasks from. It speaks when it has begun."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    with garbage_stays_here():
        pid = os.fork()
        if not pid:
            _begin(ours, theirs, close_in_child, parent, stocks)
    theirs.close()
    ours.setblocking(False)
    return pid, ours


def _begin(
    ours: socket.socket, theirs: socket.socket, others: list[socket.socket], parent: int, stocks: Mapping[str, Stock]
) -> NoReturn:
    """The new process."""
    code = 1
    try:
        end_with_parent(signal.SIGKILL)
        for other in (ours, *others):  # or a trial would not see that the service is gone
            other.close()
        if os.getppid() == parent:
            _work(theirs, stocks)
            code = 0
    except BaseException:
        logger.exception("a worker of the shared feed failed")
    finally:
        os._exit(code)


def _work(tasks: socket.socket, stocks: Mapping[str, Stock]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of the terminal; the search decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    keep_freed_memory()
    only_loads()
    tasks.send(encode({"begun": True}))
    while packet := tasks.recv(MOST_BYTES):
        task = decode(packet)
        stock, key = stocks[task["part"]], int(task["key"])
        ids, slots = numbers(task["ids"], np.int64), numbers(task["slots"], np.int32).astype(np.int64)
        began = time.perf_counter()
        answer = _load(stock, ids, slots, key)
        tasks.send(encode({**answer, "seconds": time.perf_counter() - began}))


def _load(stock: Stock, ids: np.ndarray, slots: np.ndarray, key: int) -> dict[str, Any]:
    """Load samples; those that cannot be are named, and the trials that need them will see why for themselves."""
    try:
        stock.rows.put(slots, fetch(stock.dataset, ids, key))
        return {"drew": drew_something(stock.dataset), "bad": b""}
    except Exception as error:  # whatever a user's dataset raises
        logger.debug("samples %s...: %s", ids[:4], error)
        if len(ids) == 1:
            return {"drew": True, "bad": np.zeros(1, np.int32).tobytes()}
    drew, bad = False, []
    for at in range(len(ids)):
        try:
            stock.rows.put(slots[at : at + 1], fetch(stock.dataset, ids[at : at + 1], key))
            drew = drew or drew_something(stock.dataset)
        except Exception as error:
            kind = "" if isinstance(error, Unkept) else f"{type(error).__name__}: "
            logger.debug("sample %d: %s%s", ids[at], kind, error)
            bad.append(at)
    return {"drew": drew, "bad": np.array(bad, np.int32).tobytes()}
