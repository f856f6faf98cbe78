"""The group that the checks of the MPI backend run in: one for all their files."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from tests.native.ranks.meeting import meet


@pytest.fixture(scope="session")
def met() -> Iterator[None]:
    meet()
    yield
    dist.barrier()
    dist.destroy_process_group()
