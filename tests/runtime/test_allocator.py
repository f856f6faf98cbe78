"""Keeping freed memory: fewer page faults, shown in processes of their own."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import subprocess
import sys
from typing import Any

import pytest

from distributed_training.runtime.allocator import allocator_environment, keep_freed_memory

MEASURE = """
import json, resource, sys
import torch
from distributed_training.runtime.allocator import keep_freed_memory

kept = keep_freed_memory() if sys.argv[1] == "keep" else None

def step():
    tensors = [torch.ones(10 * 2**20) for _ in range(2)]

for _ in range(5):  # the heap finds its size
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(json.dumps({"kept": kept, "faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before}))
"""
# Blocks of 40 MB: above 32 MB glibc maps every one anew, below that it depends on what was freed before.
glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt")


def measure(how: str, **environment: str) -> dict[str, Any]:
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, how],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return json.loads(result.stdout)


@glibc
def test_repeated_allocations_cost_far_fewer_page_faults() -> None:
    default, kept, inherited = measure("default"), measure("keep"), measure("default", **allocator_environment())
    assert kept["kept"] is True
    assert kept["faults"] < default["faults"] / 5
    assert inherited["faults"] < default["faults"] / 5, "the environment does the same for other processes"


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert keep_freed_memory() is False


def test_a_refusal_of_the_c_library_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refuses:
        def mallopt(self, option: int, value: int) -> int:
            return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Refuses())
    assert keep_freed_memory() is False
