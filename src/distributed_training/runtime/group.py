"""How the ranks of a job meet, and the torch.distributed group that they form."""

from __future__ import annotations

import logging
import os
import platform
import socket
import struct
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distributed_training.runtime import failure
from distributed_training.runtime.errors import RanksError
from distributed_training.runtime.watch import Watch
from distributed_training.runtime.world import World

logger = logging.getLogger(__name__)


_stores: dict[tuple[str, int, str], Any] = {}  # connections are kept: they can take a second to make
_groups = 0  # every rank makes its groups in the same order


class Group:
    """All ranks of a job, connected. Every call that waits ends with an error at the deadline."""

    def __init__(self, world: World, device: torch.device, deadline: float, backend: str = "auto") -> None:
        global _groups
        self.world, self.device = world, device
        self._deadline = timedelta(seconds=deadline)
        _groups += 1
        keys = f"dtrain/{world.attempt}/{_groups}"  # a launcher's store outlives the processes that it restarts
        store = meet(world, deadline, keys)
        place = (world.master or "127.0.0.1", world.port)
        own = _kept((*place, "watch"), store.clone)  # a wait on one connection must not block the other
        self.watch = Watch(world, deadline, dist.PrefixStore(f"{keys}/watch", own))
        failure.watch_over(self.watch, world)
        self.backend = choose_backend(backend, device)
        self._own_group = not dist.is_initialized()
        self._variables: list[str] = []
        if self._own_group:
            self._variables = choose_interface(place[0])
            dist.init_process_group(
                self.backend,
                store=dist.PrefixStore(f"{keys}/group", store),
                rank=world.rank,
                world_size=world.size,
                timeout=self._deadline * 2,  # the watch speaks first: it knows more
                device_id=device if device.type == "cuda" and self.backend == "nccl" else None,
            )

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all ranks, as a new tensor."""
        value = value.detach().clone()
        with self.watch.waiting("a sum over all ranks"):
            dist.all_reduce(value)
        return value

    def gather(self, value: Tensor) -> Tensor:
        """Rows of all ranks in rank order; their numbers may differ."""
        with self.watch.waiting("gathering values of all ranks"):
            value = value.detach().contiguous()
            own = torch.tensor([len(value)], device=value.device)
            lengths = [torch.zeros_like(own) for _ in range(self.world.size)]
            dist.all_gather(lengths, own)
            longest = int(max(lengths))
            padded = value.new_zeros((longest, *value.shape[1:]))
            padded[: len(value)] = value
            parts = [torch.empty_like(padded) for _ in lengths]
            dist.all_gather(parts, padded)
        return torch.cat([part[: int(length)] for part, length in zip(parts, lengths)])

    def broadcast(self, value: Tensor, source: int = 0) -> Tensor:
        """The value of one rank on all of them, in place."""
        with self.watch.waiting(f"a value of rank {source}"):
            dist.broadcast(value, source)
        return value

    def barrier(self) -> None:
        """Wait for every rank."""
        with self.watch.waiting("a barrier"):
            dist.barrier()

    def close(self) -> None:
        """Leave. Safe to call twice."""
        failure.watch_over(None, self.world)
        self.watch.close()
        if self._own_group and dist.is_initialized():
            dist.destroy_process_group()
            self._own_group = False
        for name in self._variables:
            os.environ.pop(name, None)


def choose_backend(name: str, device: torch.device) -> str:
    """NCCL between GPUs, Gloo between CPUs, unless a backend is named."""
    if name != "auto":
        return name
    return "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"


def meet(world: World, deadline: float, keys: str) -> Any:
    """The store at the meeting point, when all ranks have come; an error that names those which have not."""
    place = (world.master or "127.0.0.1", world.port)
    opens = world.rank == 0 and not world.hosted
    store = _kept((*place, "group"), lambda: (_open if opens else _connect)(place, deadline))
    arrivals = dist.PrefixStore(f"{keys}/arrived", store)
    arrivals.set(str(world.rank), f"{platform.node()}, process {os.getpid()}")
    end = time.monotonic() + deadline
    everybody = [str(rank) for rank in range(world.size)]
    while not arrivals.check(everybody):
        if time.monotonic() > end:
            missing = [rank for rank in everybody if not arrivals.check([rank])]
            raise RanksError(
                f"{world.label}: after {deadline:g} s {_named(missing)} had not come to {place[0]}:{place[1]}; "
                "start them, or raise run.deadline (docs/troubleshooting.md#a-rank-hangs-or-never-arrives)"
            )
        time.sleep(0.02)
    return store


def _named(ranks: list[str]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks[:8])}{' and more' if len(ranks) > 8 else ''}"


def _kept(key: tuple[str, int, str], make: Callable[[], Any]) -> Any:
    if key not in _stores:
        _stores[key] = make()
    return _stores[key]


def _open(place: tuple[str, int], deadline: float) -> Any:
    try:
        return dist.TCPStore(*place, is_master=True, timeout=timedelta(seconds=deadline), wait_for_workers=False)
    except RuntimeError as error:
        text = str(error).splitlines()[0]
        if "EADDRINUSE" in text or "in use" in text:
            raise RanksError(
                f"rank 0: port {place[1]} is in use on {platform.node()}; set MASTER_PORT to a free one on all machines"
            ) from None
        raise RanksError(f"rank 0 cannot listen at {place[0]}:{place[1]}: {text}") from None


def _connect(place: tuple[str, int], deadline: float) -> Any:
    """A client of the store. Tried again until the deadline: ranks do not start at the same moment."""
    end = time.monotonic() + deadline
    while True:
        try:
            socket.create_connection(place, timeout=max(0.1, min(5.0, end - time.monotonic()))).close()
            break
        except OSError as error:
            if time.monotonic() > end:
                raise RanksError(
                    f"no answer from the master at {place[0]}:{place[1]} within {deadline:g} s "
                    f"({error.strerror or error}); check MASTER_ADDR, MASTER_PORT, the firewall, and that rank 0 runs "
                    "(docs/troubleshooting.md#the-master-cannot-be-reached)"
                ) from None
            time.sleep(0.1)
    return dist.TCPStore(*place, is_master=False, timeout=timedelta(seconds=deadline), wait_for_workers=False)


def choose_interface(master: str) -> list[str]:
    """Let Gloo and NCCL use the network that leads to the master: a host's name may stand for another one.

    A user's own choice is kept. Gives the names of the variables that were set.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((master, 9))
            address = probe.getsockname()[0]
    except OSError:
        return []
    name = _interface_of(address)
    wanted = ["GLOO_SOCKET_IFNAME"] if name == "lo" else ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"]
    chosen = [variable for variable in wanted if name is not None and variable not in os.environ]
    for variable in chosen:
        os.environ[variable] = name or ""
    return chosen


def _interface_of(address: str) -> str | None:
    try:
        import fcntl
    except ImportError:  # pragma: no cover (not Linux)
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
            except OSError:
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
