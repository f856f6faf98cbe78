"""The strategies that divide optimizer, gradients or weights among ranks, in real processes."""

from __future__ import annotations

import pytest
from tests.forked_ranks import RankServer


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("strategy", "ranks"), [("zero1", 2), ("zero1", 3), ("zero2", 2), ("zero3", 3)])
def test_what_they_must_get_right_beyond_the_contract(rank_server: RankServer, strategy: str, ranks: int) -> None:
    rank_server.check(ranks, ["tests/strategies/ranks/sharded_checks.py"], STRATEGY=strategy)
