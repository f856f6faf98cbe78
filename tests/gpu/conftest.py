"""Tests that need CUDA. Continuous integration has none: they are run by hand on a machine with a GPU."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "/gpu/" in str(item.path):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def _compiler_started() -> None:
    """torch.compile starts threads and sets variables at its first use, and keeps them."""
    if torch.cuda.is_available():
        torch.compile(lambda x: x + 1)(torch.zeros(1, device="cuda"))
