"""The backend over MPI, under the real mpirun: every operation, what torch builds on it."""

from __future__ import annotations

import psutil
import pytest
from tests.launching import run_mpi

CHECKS = ["tests/native/ranks/backend_checks.py", "tests/native/ranks/backend_group_checks.py"]
IN_RANKS = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
ONE_HOST: dict[str, str] = {}
PLAIN_MPI = {"DTRAIN_MPI_SHARED_MEMORY": "0"}
PRETENDED_HOSTS = {"DTRAIN_MPI_RANKS_PER_HOST": "2"}  # two hosts of two ranks, or one of two and one of one


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("ranks", "way"),
    [
        pytest.param(2, ONE_HOST, id="one-host-of-two"),
        pytest.param(2, PLAIN_MPI, id="plain-mpi"),
        pytest.param(4, PRETENDED_HOSTS, id="two-hosts-of-two"),
        pytest.param(3, PRETENDED_HOSTS, id="hosts-of-two-and-one"),
    ],
)
def test_every_operation(ranks: int, way: dict[str, str]) -> None:
    run_mpi(ranks, [*IN_RANKS, *CHECKS], **way)


@pytest.mark.timeout(300)
def test_what_torch_builds_on_it() -> None:
    run_mpi(2, [*IN_RANKS, "tests/native/ranks/torch_checks.py"])


@pytest.mark.skipif(psutil.virtual_memory().available < 12 * 2**30, reason="needs 12 GB of memory")
def test_more_than_2_to_the_31_elements() -> None:
    run_mpi(2, ["-m", "tests.native.ranks.long_tensor"])
