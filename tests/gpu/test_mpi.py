"""The backend over MPI on a GPU: two ranks share it."""

from __future__ import annotations

import json

import pytest
from tests.launching import run_mpi

PYTEST = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("hosts", ["one", "two"])
def test_the_backend(hosts: str) -> None:
    pretended = {"DTRAIN_MPI_RANKS_PER_HOST": "1"} if hosts == "two" else {}
    run_mpi(2, [*PYTEST, "tests/gpu/mpi_checks.py"], timeout=380, **pretended)


@pytest.mark.timeout(400)
def test_the_contract() -> None:
    words = {"STRATEGY": "mpi", "OPTIONS": json.dumps({}), "DEVICE": "cuda"}
    run_mpi(2, [*PYTEST, "tests/strategies/ranks/contract_native.py"], timeout=380, **words)
