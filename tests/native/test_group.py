"""How ranks under MPI find rank 0, one process at a time. Whole jobs are in tests/strategies and tests/launch."""

from __future__ import annotations

import socket

import pytest
from tests.launching import free_port

from distributed_training.native.mpi import group
from distributed_training.runtime.errors import ConfigError, RanksError
from distributed_training.runtime.world import World

TWO = World(rank=1, size=2, launcher="mpirun")


class Extension:
    """An MPI in which this process is alone."""

    def init(self, deadline: float) -> tuple[int, int]:
        return 0, 1

    def library(self) -> str:
        return "Open MPI v5"


def test_a_launcher_of_another_mpi_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"mpirun started rank 1 of 2, but Open MPI v5 sees rank 0 of 1.*MPICXX"):
        group._join(Extension(), TWO, 1.0)


def test_the_first_address_that_leads_there_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as rank_0:
        port = rank_0.getsockname()[1]
        assert group._reachable(["127.0.0.2", "127.0.0.1"], port, TWO, 5.0) == "127.0.0.1"


def test_a_rank_0_that_cannot_be_reached_is_named() -> None:
    port = free_port()
    with pytest.raises(RanksError, match=f"rank 1 of 2 cannot reach rank 0 at port {port} of 127.0.0.1 within 0.1 s"):
        group._reachable(["127.0.0.1"], port, TWO, 0.1)


def test_a_machine_without_a_network_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "own_addresses", list)
    with pytest.raises(RanksError, match="set MASTER_ADDR"):
        group._addresses(TWO)
    assert group._addresses(World(size=2, master="10.0.0.1")) == ["10.0.0.1"]


def test_a_port_that_was_asked_for_and_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(RanksError, match=f"cannot listen at port {port}"):
            group._open(["127.0.0.1"], World(size=2, port=port), 1.0)
