"""How the ranks that horovodrun started talk: through Horovod in place of torch.distributed."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from http.client import HTTPConnection, HTTPException
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distributed_training.runtime import failure
from distributed_training.runtime.errors import ConfigError, RanksError
from distributed_training.runtime.group import Group, connect
from distributed_training.runtime.imports import require
from distributed_training.runtime.interfaces import address_towards
from distributed_training.runtime.watch import HUNG, Watch
from distributed_training.runtime.world import World, named

_ADDABLE = (torch.float16, torch.float32, torch.float64, torch.int32, torch.int64)
_TIMEOUT = "HOROVOD_GLOO_TIMEOUT_SECONDS"
_PLACE_BYTES = 280  # the longest name of a host, and a port
_store: Any = None  # kept for the life of the process: connections can take a second to make
_groups = 0  # every rank makes its groups in the same order


class HorovodGroup(Group):
    """All ranks of a job, connected by Horovod. The same calls as through torch.distributed."""

    def __init__(self, world: World, device: torch.device, deadline: float) -> None:
        global _groups
        self.world, self.device, self.backend = world, device, "horovod"
        self._own_group, self._variables = False, []  # no group of torch's, nothing to give back
        self.library = _join(world, deadline)
        _groups += 1
        store, place = _meet(self.library, world, deadline)
        known = replace(world, master=place[0], port=place[1], hosted=False)
        self.watch = Watch(known, deadline, dist.PrefixStore(f"dtrain/{_groups}/watch", store))
        failure.watch_over(self.watch)

    # Horovod matches what ranks send by name. The names are fixed: ranks make these calls one at a time and in the same
    # order, and a name that comes again is found in Horovod's cache.

    def sum(self, value: Tensor) -> Tensor:
        kind, value = value.dtype, value.detach().contiguous()
        if kind not in _ADDABLE:
            value = value.to(torch.float32 if kind.is_floating_point else torch.int64)
        with self.watch.waiting("a sum over all ranks"):
            total: Tensor = self.library.allreduce(value, name="sum", op=self.library.Sum)
        return total.to(kind)

    def gather(self, value: Tensor) -> Tensor:
        with self.watch.waiting("gathering values of all ranks"):
            parts = self.library.allgather(_as_bytes(value.detach().contiguous()), name="gather")
        rows: Tensor = parts.view(value.dtype).reshape(-1, *value.shape[1:])
        return rows

    def broadcast(self, value: Tensor, source: int = 0) -> Tensor:
        with self.watch.waiting(f"a value of rank {source}"), torch.no_grad():
            whole = value.detach().contiguous()
            self.library.broadcast_(_as_bytes(whole), source, name="broadcast")
            if whole.data_ptr() != value.data_ptr():
                value.copy_(whole)
        return value

    def barrier(self) -> None:
        with self.watch.waiting("a barrier"):
            self.library.barrier()


def _as_bytes(value: Tensor) -> Tensor:
    """The same memory as bytes: Horovod knows few types, but all of these can be copied."""
    return value.reshape(-1).view(torch.uint8)


def _join(world: World, deadline: float) -> Any:
    """Horovod, once all ranks have come. It is left running when a group closes: ranks that leave horovodrun's
    rendezvous and come again can find each other's old addresses there and hang."""
    hvd: Any = require(
        "horovod.torch",
        "horovod",
        "strategy=horovod",
        note="pip alone cannot build it against a recent torch: scripts/build_horovod.sh in the source repository does",
    )
    if not hvd.is_initialized():
        with _arrival_watched(world, deadline):
            hvd.init()
    if (hvd.rank(), hvd.size()) != (world.rank, world.size):
        raise ConfigError(
            f"strategy=horovod: {world.launcher} started {world.label}, but Horovod sees rank {hvd.rank()} of "
            f"{hvd.size()}; start the ranks with Horovod's own launcher: horovodrun -np {world.size} "
            "python -m distributed_training train ..."
        )
    return hvd


@contextmanager
def _arrival_watched(world: World, deadline: float) -> Iterator[None]:
    """Around Horovod's start, where it waits for all ranks and then aborts the process: speak before it does."""
    own = _TIMEOUT not in os.environ
    if own:  # read once, at the start. The watch speaks first later on, too: it knows more
        os.environ[_TIMEOUT] = str(math.ceil(deadline * 2))
    timer = threading.Timer(deadline, _give_up, (world, deadline))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        if own:
            del os.environ[_TIMEOUT]


def _give_up(world: World, deadline: float) -> None:
    missing = [str(rank) for rank in range(world.size) if not _has_come(rank)]
    sys.stderr.write(
        f"[rank {world.rank}] {world.label}: after {deadline:g} s {named(missing) if missing else 'some rank'} had not "
        "come to the rendezvous of horovodrun; see why above, or raise run.deadline "
        "(docs/troubleshooting.md#a-rank-hangs-or-never-arrives)\n"
    )
    sys.stderr.flush()
    os._exit(HUNG)  # the training thread is in Horovod, which cannot be interrupted


def _has_come(rank: int) -> bool:
    """Whether a rank has left its address at horovodrun's rendezvous, a small HTTP server."""
    host, port = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR"), os.environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT")
    if host is None or port is None:
        return True  # another launcher, which cannot be asked
    connection = HTTPConnection(host, int(port), timeout=2)
    try:
        connection.request("GET", f"/global/{rank}")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return True
    finally:
        connection.close()


def _meet(hvd: Any, world: World, deadline: float) -> tuple[Any, tuple[str, int]]:
    """(store, its address): where ranks tell each other of failures, past Horovod, which may be what failed."""
    global _store
    if world.rank == 0 and _store is None:
        _store = dist.TCPStore(
            _own_address(world), 0, is_master=True, timeout=timedelta(seconds=deadline), wait_for_workers=False
        )
    said = f"{_store.host} {_store.port}".encode() if world.rank == 0 else b""
    line = torch.tensor(list(said.ljust(_PLACE_BYTES)), dtype=torch.uint8)
    host, port = bytes(hvd.broadcast(line, 0, name="meeting point").tolist()).decode().split()
    if _store is None:
        _store = connect((host, int(port)), deadline)
    return _store, (host, int(port))


def _own_address(world: World) -> str:
    """Where the other ranks can reach this machine: on the network that leads to the launcher."""
    if world.local_size == world.size:
        return "127.0.0.1"
    address = address_towards(world.master) if world.master is not None else None
    if address is None:
        raise RanksError(
            f"{world.label} does not know under which address the other machines see it: set MASTER_ADDR to the "
            "address of the machine that all of them reach"
        )
    return address
