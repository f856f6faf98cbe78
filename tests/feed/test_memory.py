"""Memory stays under its bound on both sides, whichever is faster. `benchmarks/feed_memory.py` does so for longer."""

from __future__ import annotations

import pytest
from benchmarks.feed_memory import MEBI, run
from tests.feed.conftest import StartLoader


@pytest.mark.parametrize(
    ("pattern", "shared"),
    [("loaders faster", False), ("loaders faster", True), ("consumer faster", True), ("by turns", False)],
)
def test_memory_stays_under_its_bound(start_loader: StartLoader, pattern: str, shared: bool) -> None:
    outcome = run(pattern, shared, 400, 8 * MEBI, start_loader)
    assert outcome.problem == ""
    assert outcome.held > MEBI  # it was used, too
