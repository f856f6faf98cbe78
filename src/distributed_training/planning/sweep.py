"""How fast ranks on this machine talk: run in every rank, `python -m distributed_training.planning.sweep OUT STRATEGY`.

Times each operation over sizes, and how much of a transfer is free beside a computation.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distributed_training.runtime.threads import keep_waits_short

SIZES = (4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
_SECONDS = 0.15  # for each operation and size
_MOST = 40


def main(out: str, strategy: str, device_name: str, deadline: float) -> None:
    """Join the other ranks and measure."""
    keep_waits_short()
    import torch

    from distributed_training.config import StrategyConfig
    from distributed_training.runtime.allocator import keep_freed_memory
    from distributed_training.runtime.device import choose_device
    from distributed_training.runtime.world import read_world
    from distributed_training.strategies import Place, make_strategy

    keep_freed_memory()
    world = read_world()
    device = choose_device(device_name, world.local_rank)
    joined: Any = make_strategy(Place(device, world, StrategyConfig(name=strategy), deadline))
    try:
        found: dict[str, Any] = {"backend": joined.group.backend, "ranks": world.size, "times": {}}
        for name in ("all_reduce", "all_gather", "reduce_scatter", "broadcast"):
            found["times"][name] = [
                [size, _timed(_operation(name, size, device, world.size), device)] for size in SIZES
            ]
        found["overlap"] = _overlap(torch, device)
        if world.rank == 0:
            Path(out).write_text(json.dumps(found), encoding="utf-8")
        joined.barrier()
    finally:
        joined.teardown()


def _operation(name: str, size: int, device: Any, ranks: int) -> Callable[[], Any]:
    import torch
    import torch.distributed as dist

    whole = torch.zeros(size // 4 // ranks * ranks, device=device)
    part = torch.zeros(len(whole) // ranks, device=device)
    if name == "all_reduce":
        return lambda: dist.all_reduce(whole)
    if name == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part)
    if name == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole)
    return lambda: dist.broadcast(whole, 0)


def _timed(call: Callable[[], Any], device: Any) -> float:
    """The middle of some repetitions. All ranks must do as many: rank 0's first ones decide."""
    import torch
    import torch.distributed as dist

    def once() -> float:
        _wait(device)
        begin = time.perf_counter()
        call()
        _wait(device)
        return time.perf_counter() - begin

    once()
    first = torch.tensor([once()], device=device)
    dist.all_reduce(first)
    times = max(3, min(_MOST, int(_SECONDS / max(float(first) / dist.get_world_size(), 1e-6))))
    return statistics.median(once() for _ in range(times))


def _overlap(torch: Any, device: Any) -> float:
    """Share of a transfer that costs a computation beside it nothing: from both alone and both at once."""
    import torch.distributed as dist

    gradients = torch.zeros(4 << 20, device=device)
    size = 512 if device.type == "cpu" else 4096
    left, right = (torch.rand(size, size, device=device) for _ in range(2))
    transfer = _timed(lambda: dist.all_reduce(gradients), device)
    product = _timed(lambda: left @ right, device)
    counted = torch.tensor([max(1, round(transfer / product))], device=device)
    dist.broadcast(counted, 0)
    count = int(counted)

    def compute() -> None:
        for _ in range(count):
            left @ right

    def both() -> None:
        work = dist.all_reduce(gradients, async_op=True)
        compute()
        assert work is not None
        work.wait()

    alone, together = _timed(compute, device), _timed(both, device)
    return max(0.0, min(1.0, (alone + transfer - together) / min(alone, transfer)))


def _wait(device: Any) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]))
