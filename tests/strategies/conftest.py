"""What the tests of strategies share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.forked_ranks import COMMON, RankServer


@pytest.fixture(scope="session")
def rank_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankServer]:
    """Starts ranks that have imported DeepSpeed and Accelerate, too."""
    server = RankServer(tmp_path_factory.mktemp("ranks"), [*COMMON, "tests.strategies.ranks.libraries"])
    yield server
    server.close()
