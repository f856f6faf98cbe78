"""Every strategy of many processes passes the contract, run in real processes."""

from __future__ import annotations

import json

import pytest
from tests.forked_ranks import RankServer
from tests.launching import CHECKS, run_ranks

CONTRACT = "tests/strategies/ranks/contract_native.py"

CASES = [
    pytest.param("ddp", {"bucket_mb": 0.0001, "find_unused_parameters": True}, 3, id="ddp-many-buckets"),
    pytest.param("ddp", {"bucket_mb": 0.0001}, 3, id="ddp-large-gradients"),
    pytest.param("accelerate", {}, 2, id="accelerate"),
    pytest.param("accelerate", {"plugin": "fsdp"}, 2, id="accelerate-fsdp"),
    pytest.param("accelerate", {"plugin": "deepspeed"}, 2, id="accelerate-deepspeed"),
    pytest.param("zero1", {}, 2, id="zero1"),
    pytest.param("zero1", {"bucket_mb": 0.0001, "find_unused_parameters": True}, 3, id="zero1-three"),
    pytest.param("zero2", {}, 2, id="zero2"),
    pytest.param("zero3", {}, 3, id="zero3-three"),
    pytest.param("fsdp", {}, 2, id="fsdp"),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("strategy", "options", "ranks"), CASES)
def test_the_contract(rank_server: RankServer, strategy: str, options: dict[str, object], ranks: int) -> None:
    rank_server.check(ranks, [CONTRACT], measured=True, STRATEGY=strategy, OPTIONS=json.dumps(options))


@pytest.mark.timeout(300)
def test_the_contract_under_torchrun() -> None:
    run_ranks(2, [*CHECKS, CONTRACT], STRATEGY="ddp")
