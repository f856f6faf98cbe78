"""How much memory a training holds at most, between two looks: on the CPU what is resident, on a GPU what is allocated.

On the CPU, pages of files (libraries that are read as they are used) are left out: only what was allocated counts. For
this to be exact, freed memory must go back to the system (`runtime.allocator.return_freed_memory`).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from distributed_training.runtime.errors import BenchError

if TYPE_CHECKING:
    import torch


class ResidentMemory:
    """Of this process, from /proc."""

    def __init__(self) -> None:
        if not sys.platform.startswith("linux"):
            raise BenchError("memory on the CPU is measured through /proc, which only Linux has: measure on a GPU")
        self.base = self._now()

    def rebase(self) -> None:
        """What is there now counts as nothing from here on."""
        self.base = self._now()

    def peak(self) -> float:
        """Bytes beyond the base, at most since the last look."""
        values = self._values()
        peak = values["VmHWM"] - values["RssFile"] - self.base
        Path("/proc/self/clear_refs").write_text("5")
        return peak

    def _now(self) -> float:
        values = self._values()
        return values["RssAnon"] + values["RssShmem"]

    @staticmethod
    def _values() -> dict[str, float]:
        lines = Path("/proc/self/status").read_text().splitlines()
        return {
            key: int(rest.split()[0]) * 1024.0 for key, _, rest in (x.partition(":") for x in lines) if "kB" in rest
        }


class AllocatedMemory:
    """Of torch's allocator on one GPU. What the driver and NCCL take beside it is not in it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.base = 0.0
        self.rebase()

    def rebase(self) -> None:
        """What is there now counts as nothing from here on."""
        import torch

        self.base = float(torch.cuda.memory_allocated(self._device))
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> float:
        """Bytes beyond the base, at most since the last look."""
        import torch

        peak = float(torch.cuda.max_memory_allocated(self._device)) - self.base
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak


Meter = ResidentMemory | AllocatedMemory


def meter_for(device: torch.device) -> Meter:
    """The meter that fits the device."""
    return AllocatedMemory(device) if device.type == "cuda" else ResidentMemory()


def process_size() -> float:
    """Bytes that this process has allocated in all, before there is a model; 0 where the system does not say."""
    return ResidentMemory().base if sys.platform.startswith("linux") else 0.0


def resident() -> float:
    """Bytes of this process that are in memory now, libraries included; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return float(pages * os.sysconf("SC_PAGE_SIZE"))
