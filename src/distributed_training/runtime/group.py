"""How the ranks of a job meet, and the torch.distributed group that they form."""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import platform
import queue
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distributed_training.runtime import failure
from distributed_training.runtime.errors import RanksError
from distributed_training.runtime.interfaces import choose_interface
from distributed_training.runtime.native_threads import let_rest_at_exit
from distributed_training.runtime.watch import Watch
from distributed_training.runtime.world import World, named, nowhere_to_meet

logger = logging.getLogger(__name__)


_stores: dict[tuple[str, int, str], Any] = {}  # connections are kept: they can take a second to make
_REACHED_WITHIN = 10.0  # seconds that a machine has to reach itself
_groups = 0  # every rank makes its groups in the same order
_starts: dict[tuple[str, int], int] = {}


class Group:
    """All ranks of a job, connected. Every call that waits ends with an error at the deadline."""

    wires: tuple[str, ...] = ()
    """Kinds of compression that the backend does itself, on what travels: see `mean_compressed`."""

    def __init__(self, world: World, device: torch.device, deadline: float, backend: str = "auto") -> None:
        global _groups
        self.world, self.device = world, device
        self._deadline = timedelta(seconds=deadline)
        _groups += 1
        store, keys = meet(world, deadline, _groups)
        place = _meeting_point(world)
        own = _kept((*place, "watch"), store.clone)  # a wait on one connection must not block the other
        self.watch = Watch(world, deadline, dist.PrefixStore(f"{keys}/watch", own))
        failure.watch_over(self.watch)
        self.backend = choose_backend(backend, device)
        self.callbacks_may_wait = self.backend != "gloo"
        """Whether what follows an exchange may wait for another: Gloo runs it in one of its few threads."""
        let_rest_at_exit()
        self._own_group = not dist.is_initialized()
        self._variables: list[str] = []
        if self._own_group:
            self._variables = choose_interface(place[0])
            hook = sys.excepthook
            with self.watch.waiting("connecting with all ranks"):
                dist.init_process_group(
                    self.backend,
                    store=dist.PrefixStore(f"{keys}/group", store),
                    rank=world.rank,
                    world_size=world.size,
                    timeout=self._deadline * 2,  # the watch speaks first: it knows more
                    device_id=device if device.type == "cuda" and self.backend == "nccl" else None,
                )
            sys.excepthook = hook  # torch puts one around it that holds back what is written, and knows less

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all ranks, as a new tensor."""
        value = value.detach().clone()
        with self.watch.waiting("a sum over all ranks"):
            dist.all_reduce(value)
        return value

    def mean_compressed(self, value: Tensor, wire: str) -> torch.futures.Future[Any]:
        """Begin to make a tensor the mean over all ranks, in place, made smaller on its way: one of `wires`."""
        raise NotImplementedError(f"{self.backend} has no {wire}")

    def further(self) -> Any:
        """One more group of the same ranks, for exchanges whose place among the others is not the same on each."""
        with self.watch.waiting("connecting once more with all ranks"):
            return dist.new_group(timeout=self._deadline * 2)

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

    @property
    def is_own(self) -> bool:
        """Whether this object made torch's group, and ends it."""
        return self._own_group

    def close(self) -> None:
        """Leave. Safe to call twice."""
        failure.dismiss(self.watch)
        if self._own_group and dist.is_initialized():
            _keep_connections(self.device)
            dist.destroy_process_group()
            self._own_group = False
        for name in self._variables:
            os.environ.pop(name, None)


_HEARD = 1.0  # seconds
_ended: Any = None


def _keep_connections(device: torch.device) -> None:
    """Hold the connections of a group that ends, until the next one ends.

    DistributedDataParallel may live longer than the group. Were it the last to know the connections, they would be
    freed with it, under Python's lock, and wait for their threads, of which one may wait for that same lock.
    """
    global _ended
    _ended = dist.distributed_c10d._get_default_group()._get_backend(device)


def choose_backend(name: str, device: torch.device) -> str:
    """NCCL between GPUs, Gloo between CPUs, unless a backend is named."""
    if name != "auto":
        return name
    return "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"


def exchange(world: World, deadline: float, topic: str, text: str) -> list[str]:
    """A text of every rank, in rank order, on all of them: for what must be known before there is a group."""
    if world.size == 1:
        return [text]
    store, keys = meet(world, deadline, topic)
    said = dist.PrefixStore(f"{keys}/said", store)
    said.set(str(world.rank), text)
    said.wait([str(rank) for rank in range(world.size)], timedelta(seconds=deadline))
    return [bytes(said.get(str(rank))).decode() for rank in range(world.size)]


def meet(world: World, deadline: float, number: int | str) -> tuple[Any, str]:
    """The store at the meeting point, when all ranks have come, and the prefix of this meeting's keys there.

    An error names the ranks that have not come.
    """
    place = _meeting_point(world)
    opens = world.rank == 0 and not world.hosted
    store = _kept((*place, "group"), lambda: (_open if opens else connect)(place, deadline))
    keys = f"dtrain/{start_of(world, store, place, deadline)}/{number}"
    arrivals = dist.PrefixStore(f"{keys}/arrived", store)
    _arrive(world, arrivals)
    end = time.monotonic() + deadline
    everybody = [str(rank) for rank in range(world.size)]
    try:
        while not arrivals.check(everybody):
            if arrivals.check(["refused"]):
                raise RanksError(arrivals.get("refused").decode())
            if time.monotonic() > end:
                problem = _not_come(place, [rank for rank in everybody if not arrivals.check([rank])], deadline)
                arrivals.set("refused", str(problem))
                if opens:  # the store ends with this process: the others are to hear it first
                    time.sleep(_HEARD)
                raise problem
            time.sleep(0.02)
    except dist.DistNetworkError as error:
        raise RanksError(
            f"rank 0 at {place[0]}:{place[1]} is gone, before all ranks had come; its own message says why ({error})"
        ) from None
    return store, keys


def start_of(world: World, store: Any, place: tuple[str, int], deadline: float) -> int:
    """Which start of the job's ranks this is. A launcher's store outlives the ranks that it starts again.

    What a launcher says itself may differ between machines: torchrun counts a restart where a rank failed, and not
    always elsewhere. So rank 0 counts, and the others join its newest start, unless it is one of their earlier lives.
    """
    if not world.hosted:
        return world.attempt
    if place not in _starts:
        end, newest, own = time.monotonic() + deadline, store.add("dtrain/starts", int(world.rank == 0)), ""
        while not _has_begun(world, store, newest, own):
            if time.monotonic() > end:
                signed = f"dtrain/start/{newest}"
                absent = [r for r in range(world.size) if not newest or not store.check([f"{signed}/{r}"])]
                raise _not_come(place, [str(rank) for rank in absent if rank != world.rank] or ["0"], deadline)
            if world.rank:
                newest = store.add("dtrain/starts", 0)
            own = _sign(world, store, newest, own)
            time.sleep(0.02)
        _starts[place] = newest
    return _starts[place]


def _sign(world: World, store: Any, start: int, signed: str) -> str:
    """Say that this rank is there for a start; the key under which it did. Not for one that began without it."""
    key = f"dtrain/start/{start}/{world.rank}"
    if start and key != signed and not store.check([key]) and not store.check([f"dtrain/start/{start}/go"]):
        store.set(key, "")
        return key
    return signed


def _has_begun(world: World, store: Any, start: int, signed: str) -> bool:
    """Rank 0 waits for everybody and says so: it was there a moment ago, and not in an earlier life only."""
    if signed != f"dtrain/start/{start}/{world.rank}":
        return False
    if world.rank == 0 and store.check([f"dtrain/start/{start}/{rank}" for rank in range(world.size)]):
        store.set(f"dtrain/start/{start}/go", "")
    return bool(store.check([f"dtrain/start/{start}/go"]))


def _not_come(place: tuple[str, int], missing: list[str], deadline: float) -> RanksError:
    return RanksError(
        f"after {deadline:g} s {named(missing)} had not come to {place[0]}:{place[1]}; "
        "start them, or raise run.deadline (docs/troubleshooting.md#a-rank-hangs-or-never-arrives)"
    )


def _arrive(world: World, arrivals: Any) -> None:
    """Sign in. Who was started with another rank's number, or for another number of ranks, is refused by all."""
    own = f"WORLD_SIZE={world.size} on {platform.node()}, process {os.getpid()}"
    there = arrivals.compare_set(str(world.rank), "", own).decode()
    first = arrivals.compare_set("first", "", own).decode()
    if there != own and not world.hosted:  # what a launcher counts may come again after a restart
        problem = f"two processes call themselves rank {world.rank}: one with {there}, the other with {own}"
    elif first.split()[0] != own.split()[0]:
        problem = f"ranks were started for jobs of different sizes: one with {first}, rank {world.rank} with {own}"
    else:
        return
    problem += (
        "; give every process a RANK of its own and all the same WORLD_SIZE (docs/troubleshooting.md#ranks-differ)"
    )
    arrivals.set("refused", problem)
    raise RanksError(problem)


def _meeting_point(world: World) -> tuple[str, int]:
    if world.master is None and world.size == 1:  # nobody else has to find it: any free port
        return "127.0.0.1", 0
    if world.master is None:
        raise nowhere_to_meet(world)
    return world.master, world.port


def job_identity(world: World, deadline: float) -> str | None:
    """A name that a job keeps when its launcher starts it again, and that no other has; None where nobody does that."""
    if world.job is not None or not world.hosted:
        return world.job
    place = (world.master or "127.0.0.1", world.port)
    return name_job(_kept((*place, "group"), lambda: connect(place, deadline)))


def name_job(store: Any) -> str:
    """The name of the job to which a launcher's store belongs: it lives as long as the launcher."""
    return bytes(store.compare_set("dtrain/job", "", uuid.uuid4().hex)).decode()


def _kept(key: tuple[str, int, str], make: Callable[[], Any]) -> Any:
    if key not in _stores:
        _stores[key] = make()
    return _stores[key]


def keep_store(place: tuple[str, int], store: Any) -> None:
    """Meet at a store that this process has already: groups made for that place use it."""
    _stores[(*place, "group")] = store


def _open(place: tuple[str, int], deadline: float) -> Any:
    """The store itself, kept by this process. We open its port: what torch says where that fails fills the screen."""
    host, port = place
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
        local = ipaddress.ip_address(address).is_loopback
        family = socket.AF_INET6 if ":" in str(address) else socket.AF_INET
        listener = socket.create_server((str(address) if local else "", port), family=family)
    except OSError as error:
        raise RanksError(_cannot_listen(place, error)) from None
    with listener:
        port = listener.getsockname()[1]
        _check_that_it_is_here(listener, host, port, min(deadline, _REACHED_WITHIN))
        limit = timedelta(seconds=deadline)
        return dist.TCPStore(
            host, port, is_master=True, timeout=limit, wait_for_workers=False, master_listen_fd=listener.detach()
        )


def _cannot_listen(place: tuple[str, int], error: OSError) -> str:
    host, port = place
    if isinstance(error, socket.gaierror):
        why = f"{host}: no such host ({error.strerror}); set MASTER_ADDR to the address of rank 0's machine"
        return f"{why} (docs/troubleshooting.md#the-master-cannot-be-reached)"
    if error.errno == errno.EADDRINUSE:
        why = f"port {port} is in use on {platform.node()}: by another job, or by a rank 0 that still runs"
        return f"{why}; set MASTER_PORT to a free one on all machines (docs/troubleshooting.md#port-in-use)"
    return (
        f"rank 0 cannot listen at {host}:{port} ({error.strerror}); set MASTER_ADDR to an address of rank 0's machine "
        "and MASTER_PORT to a free port above 1023 (docs/troubleshooting.md#port-in-use)"
    )


def _check_that_it_is_here(listener: socket.socket, host: str, port: int, seconds: float) -> None:
    """Refuse an address that leads elsewhere: the other ranks would wait there, and this one here."""
    listener.settimeout(seconds)
    try:
        with socket.create_connection((host, port), timeout=seconds):
            listener.accept()[0].close()
    except OSError as error:
        raise RanksError(
            f"rank 0 runs on {platform.node()}, but MASTER_ADDR={host} does not lead there "
            f"({error.strerror or error}); set MASTER_ADDR to the address of rank 0's machine "
            "(docs/troubleshooting.md#the-master-cannot-be-reached)"
        ) from None
    listener.settimeout(None)


def connect(place: tuple[str, int], deadline: float) -> Any:
    """A client of the store."""
    end = time.monotonic() + deadline
    wait_for_master(place, deadline)
    limit = timedelta(seconds=deadline)
    made: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def make() -> None:
        try:
            made.put(dist.TCPStore(*place, is_master=False, timeout=limit, wait_for_workers=False))
        except RuntimeError as error:
            made.put(error)

    # torch waits for ever for the greeting of something that listens there but is no store.
    threading.Thread(target=make, name="connect", daemon=True).start()
    try:
        store = made.get(timeout=max(1.0, end - time.monotonic()))
    except queue.Empty:
        store = TimeoutError("it says nothing")
    if isinstance(store, Exception):
        raise RanksError(
            f"something listens at {place[0]}:{place[1]}, but it is not rank 0 of this job "
            f"({str(store).splitlines()[0]}); check MASTER_ADDR and MASTER_PORT "
            "(docs/troubleshooting.md#the-master-cannot-be-reached)"
        ) from None
    return store


def wait_for_master(place: tuple[str, int], deadline: float) -> None:
    """Return when somebody listens there. Tried again until the deadline: ranks do not start at the same moment."""
    end = time.monotonic() + deadline
    while True:
        try:
            socket.create_connection(place, timeout=max(0.1, min(5.0, end - time.monotonic()))).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise RanksError(
                    f"no answer from the master at {place[0]}:{place[1]} within {deadline:g} s "
                    f"({error.strerror or error}); check MASTER_ADDR, MASTER_PORT, the firewall, and that rank 0 runs "
                    "(docs/troubleshooting.md#the-master-cannot-be-reached)"
                ) from None
            time.sleep(0.1)
