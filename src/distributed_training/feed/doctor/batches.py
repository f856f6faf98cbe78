"""What a link means for training: samples a second, for batches of a given size or for those of a dataset."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from distributed_training.data.base import Dataset, Share
from distributed_training.data.plan import Plan
from distributed_training.data.steps import read_blocks
from distributed_training.feed.packing import pack
from distributed_training.runtime.errors import ConfigError
from distributed_training.wire.messages import Lease


@dataclass(frozen=True)
class BatchShape:
    """The batches that are to take the way."""

    bytes: int
    samples: int
    seconds: float = 0.0
    """What one worker here needs to load one; 0 where that is not known."""

    def __post_init__(self) -> None:
        if self.bytes < 1 or self.samples < 1:
            raise ConfigError(f"a batch of {self.samples} samples and {self.bytes} bytes; both must be at least 1")

    def estimate(self, rate: float) -> tuple[str, dict[str, float]]:
        """What a connection of so many bytes a second carries of them, and how many workers it takes to fill it."""
        carried = rate / self.bytes * self.samples
        text = f"{self.samples} samples in {self.bytes} bytes: one connection carries {_rounded(carried)} samples/s"
        values: dict[str, float] = {"batch_bytes": self.bytes, "batch_samples": self.samples}
        values["samples_per_second"] = round(carried, 3)
        if self.seconds > 0:
            loads = self.samples / self.seconds
            workers = max(1, math.ceil(carried / loads))
            values |= {"loaded_per_second": round(loads, 3), "workers_to_fill_it": workers}
            text += f"; one worker here loads {_rounded(loads)} samples/s, so {workers} fill it"
        return text, values


def measure_batches(dataset: Dataset, plan: Plan, seconds: float = 1.0) -> BatchShape:
    """Load the first steps of a plan as a worker would, for about so long."""
    lease = Lease(1, 0, 0, plan.steps_per_epoch, 0, 1, seconds)
    size = samples = 0
    start = time.perf_counter()
    for block in read_blocks(dataset, plan, Share(), 0, 0, plan.steps_per_epoch):
        size += sum(packed.size for packed in pack(lease, block, 0.0))
        samples += sum(len(ids) for ids in block.own)
        if time.perf_counter() - start > seconds:
            break
    whole = plan.batch_size / samples  # a last step may be smaller
    return BatchShape(round(size * whole), plan.batch_size, (time.perf_counter() - start) * whole)


def _rounded(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
