"""How ranks meet. Jobs of several processes are in tests/integration/test_failures.py and tests/strategies/ranks."""

from __future__ import annotations

import os
import socket
import sys

import pytest
import torch
import torch.distributed as dist
from tests.launching import free_port

from distributed_training.runtime.errors import ConfigError, RanksError
from distributed_training.runtime.group import Group, choose_backend, connect
from distributed_training.runtime.interfaces import choose_interface, own_addresses
from distributed_training.runtime.world import World

CPU = torch.device("cpu")


def test_a_group_of_one() -> None:
    before, hook = dict(os.environ), sys.excepthook
    group = Group(World(), CPU, deadline=20)
    value = torch.tensor([1.0, 2.0])
    assert group.sum(value).tolist() == [1.0, 2.0]
    assert group.gather(value).tolist() == [1.0, 2.0]
    assert group.broadcast(value) is value
    group.barrier()
    group.close()
    group.close()
    assert not dist.is_initialized()
    assert (dict(os.environ), sys.excepthook) == (before, hook)


def test_the_backend_fits_the_device_unless_one_is_named() -> None:
    assert choose_backend("auto", CPU) == "gloo"
    assert choose_backend("auto", torch.device("cuda")) == ("nccl" if dist.is_nccl_available() else "gloo")
    assert choose_backend("gloo", torch.device("cuda")) == "gloo"


def test_the_network_to_the_master_is_used_unless_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", dict(os.environ))
        assert choose_interface("127.0.0.1") == ["GLOO_SOCKET_IFNAME"]  # NCCL knows better on one machine
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
        assert choose_interface("127.0.0.1") == []


def test_other_machines_may_see_this_one_under_its_addresses() -> None:
    assert all(not address.startswith("127.") for address in own_addresses())


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(RanksError, match=f"port {port} is in use on"):
            Group(World(size=2, master="127.0.0.1", port=port), CPU, deadline=1)


def test_a_master_that_is_not_there_is_named() -> None:
    port = free_port()
    with pytest.raises(RanksError, match=f"no answer from the master at 127.0.0.1:{port} within 0.5 s"):
        connect(("127.0.0.1", port), 0.5)


def test_ranks_without_a_meeting_point_are_told_what_to_set() -> None:
    world = World(rank=1, size=2, launcher="mpirun")
    with pytest.raises(ConfigError, match=r"set MASTER_ADDR .* or use strategy=mpi"):
        Group(world, CPU, deadline=0.5)


def test_ranks_that_have_not_come_are_named() -> None:
    port = free_port()
    with pytest.raises(RanksError, match=f"after 0.5 s ranks 1, 2 had not come to 127.0.0.1:{port}"):
        Group(World(size=3, master="127.0.0.1", port=port), CPU, deadline=0.5)
