"""Environment variables for libraries that can be told in no other way."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def environment_for_a_while(**variables: str) -> Iterator[None]:
    """Set variables, and put the environment back after: what a library sets in the meantime goes too."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
