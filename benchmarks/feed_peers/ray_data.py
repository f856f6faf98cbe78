"""Ray Data: one actor gathers batches, `iter_torch_batches` reads them."""

from __future__ import annotations

import logging
import os
from typing import Any

from distributed_training.bench.transport.base import Case, Take

NEEDS = ["ray"]


def run(case: Case, take: Take) -> None:
    """Ids become rows in an actor of one process; blocks travel through Ray's object store."""
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_TRAIN_V2_ENABLED="1", RAY_DEDUP_LOGS="0")
    import ray

    class Gather:
        def __init__(self) -> None:
            self.inputs, self.targets = case.arrays()

        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            ids = batch["id"] % len(self.targets)
            return {"inputs": self.inputs[ids], "targets": self.targets[ids]}

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        batches = 16_000_000 // (case.width * 4)  # about a gigabyte in all
        ids = ray.data.range(case.rows * min(batches, 20_000), override_num_blocks=64)
        rows = ids.map_batches(Gather, batch_size=case.rows, concurrency=1)
        while True:
            for batch in rows.iter_torch_batches(batch_size=case.rows, prefetch_batches=4):
                if not take(batch["inputs"], batch["targets"]):
                    return
    finally:
        ray.shutdown()


WAYS = {"Ray Data": run}
