"""How ranks that mpirun started form a group: MPI tells them where they meet, and carries what they exchange."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distributed_training.native.mpi import BACKEND, register
from distributed_training.native.toolchain import find_mpirun
from distributed_training.runtime.errors import ConfigError, RanksError
from distributed_training.runtime.group import Group, keep_store
from distributed_training.runtime.interfaces import own_addresses
from distributed_training.runtime.world import DEFAULT_PORT, World

_TRY = 2.0  # seconds for one address of several: some lead nowhere from here
_met: World | None = None  # MPI starts once in a process, and so do the ranks meet once


class MPIGroup(Group):
    """All ranks of a job, connected by MPI. The same calls as through any other backend."""

    wires = ("bf16", "int8")

    def __init__(self, world: World, device: torch.device, deadline: float, backend: str = "mpi") -> None:
        global _met
        extension = register()
        _join(extension, world, deadline)
        if _met is None:
            _met = _meet(extension, world, deadline)
        super().__init__(_met, device, deadline, BACKEND)
        # It has threads enough for it, but exchanges begun there come in another order on every rank.
        self.callbacks_may_wait = False

    def mean_compressed(self, value: Tensor, wire: str) -> torch.futures.Future[Any]:
        backend: Any = dist.distributed_c10d._get_default_group()._get_backend(value.device)
        future: torch.futures.Future[Any] = backend.allreduce_compressed(value, wire, True).get_future()
        return future


def _join(extension: Any, world: World, deadline: float) -> None:
    """Start MPI, once all ranks have come, and check that it sees the ranks that the launcher described."""
    rank, size = extension.init(deadline)
    if (rank, size) != (world.rank, world.size):
        raise ConfigError(
            f"{world.launcher} started {world.label}, but {extension.library()} sees rank {rank} of {size}: start the "
            f"ranks with its own launcher, {find_mpirun() or 'mpirun'} -np {world.size} dtrain train ..., or set "
            "MPICXX to the mpicxx that belongs to the mpirun in use"
        )


def _meet(extension: Any, world: World, deadline: float) -> World:
    """The world with the address and port at which rank 0 keeps the store; both come to the others over MPI."""
    if world.size == 1:
        return world
    store, said = None, b""
    if world.rank == 0:
        addresses = _addresses(world)
        store, port = _open(addresses, world, deadline)
        said = json.dumps({"addresses": addresses, "port": port}).encode()
    place = json.loads(extension.broadcast_bytes(said, 0, deadline))
    if store is None:
        master = _reachable(place["addresses"], place["port"], world, deadline)
    else:
        master = place["addresses"][0]
        keep_store((master, place["port"]), store)
    return replace(world, master=master, port=place["port"], hosted=False)


def _addresses(world: World) -> list[str]:
    """Where others may find this process: MASTER_ADDR if it is given, else all addresses of this machine."""
    found = [world.master] if world.master is not None else own_addresses()
    if not found:
        raise RanksError(
            f"{world.label} finds no address for other machines to reach it: set MASTER_ADDR to one of its own"
        )
    return found


def _open(addresses: list[str], world: World, deadline: float) -> tuple[Any, int]:
    """The store, kept by this process, and its port: MASTER_PORT where that is not the usual one, else a free one."""
    wanted = world.port if world.port != DEFAULT_PORT else 0
    alone = addresses[0].startswith("127.")
    family = socket.AF_INET6 if ":" in addresses[0] else socket.AF_INET
    try:
        listener = socket.create_server(("127.0.0.1" if alone else "", wanted), family=family)
    except OSError as error:
        raise RanksError(
            f"rank 0 cannot listen at port {wanted} ({error.strerror}); set MASTER_PORT to a free one"
        ) from None
    port = listener.getsockname()[1]
    limit = timedelta(seconds=deadline)
    host = "127.0.0.1" if alone else addresses[0]
    store = dist.TCPStore(
        host, port, is_master=True, timeout=limit, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def _reachable(addresses: list[str], port: int, world: World, deadline: float) -> str:
    """The first of rank 0's addresses that leads there from this machine."""
    end = time.monotonic() + deadline
    while True:
        for address in addresses:
            try:
                socket.create_connection((address, port), timeout=_TRY).close()
                return address
            except OSError as error:
                last = error
        if time.monotonic() > end:
            raise RanksError(
                f"{world.label} cannot reach rank 0 at port {port} of {', '.join(addresses)} within {deadline:g} s "
                f"({last.strerror or last}); check the firewall, or set MASTER_ADDR to an address that all reach "
                "(docs/troubleshooting.md#the-master-cannot-be-reached)"
            )
        time.sleep(0.1)
