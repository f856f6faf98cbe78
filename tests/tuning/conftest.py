"""One Ray cluster for all tests of searches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest
from tests.ray_nodes import Nodes

with suppress(ImportError):
    import ray.tune  # noqa: F401 (it and W&B leave things behind when they are imported: before a test, none is blamed)
    import wandb  # noqa: F401


@pytest.fixture(scope="session")
def nodes() -> Iterator[Nodes]:
    """Two nodes with two CPUs each."""
    with Nodes(2, 2) as cluster:
        yield cluster
