"""Peaks of memory, measured in processes of their own: what others had allocated and freed before would change them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

MEASURE = """
import json
import torch
from distributed_training.runtime.allocator import return_freed_memory
from distributed_training.runtime.meters import ResidentMemory

return_freed_memory()
meter = ResidentMemory()
meter.peak()
torch.ones(25_000_000)  # 100 MB, freed at once
print(json.dumps([meter.peak(), meter.peak()]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="read from /proc")
def test_a_peak_is_seen_after_it_is_over_and_once() -> None:
    result = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, timeout=60, check=True)
    peak, later = json.loads(result.stdout)

    assert 95e6 < peak < 130e6
    assert later < 30e6
