"""What one rank of benchmarks/mpi.py measures. All ranks do the same; rank 0's figures count.

python benchmarks/mpi_ranks.py PART ROUNDS FILE      a part of the benchmark, in a rank under mpirun
python benchmarks/mpi_ranks.py --turns SIDE FOLDER   one of two jobs that take turns
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

KB, MB = 1024, 1024**2
SIZES = (4 * KB, 64 * KB, 256 * KB, MB, 4 * MB, 16 * MB, 32 * MB, 128 * MB)
ACROSS = (4 * KB, 64 * KB, 256 * KB, MB, 8 * MB, 32 * MB)  # bytes between two machines
SLOW = 4 * MB  # bytes over the slow link
MANY = 100_000  # all-reduces that must leave nothing behind
STEPS = 8
Turn = Callable[[], float]
Figures = dict[str, Any]


class Ranks:
    """The ranks of a launch, on our backend and on Gloo."""

    def __init__(self, gloo: bool = True, device: str = "cpu") -> None:
        import torch
        import torch.distributed as dist

        from distributed_training.native.mpi import register
        from distributed_training.native.mpi.group import MPIGroup
        from distributed_training.runtime.allocator import keep_freed_memory
        from distributed_training.runtime.world import read_world

        logging.disable(logging.WARNING)
        torch.set_num_threads(1)
        keep_freed_memory()
        self.extension = register()
        self.group = MPIGroup(read_world(), torch.device(device), 300.0)
        self.ours = dist.group.WORLD
        self.gloo = dist.new_group(backend="gloo") if gloo else None
        self.backend = self.ours._get_backend(torch.device(device))
        self.rank = dist.get_rank()

    def repeated(self, call: Callable[[], Any], times: int) -> Turn:
        """A turn: seconds of one call, from a barrier on."""
        import torch.distributed as dist

        def turn() -> float:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(times):
                call()
            return (time.perf_counter() - start) / times

        return turn

    def in_c(self, call: Callable[[Any, int], float], tensor: Any, times: int) -> Turn:
        """A turn of a loop in C; `call` gives its seconds."""
        import torch.distributed as dist

        def turn() -> float:
            dist.barrier()
            return float(call(tensor, times))

        return turn


def times_of(size: int) -> int:
    """Calls in a turn: enough to be longer than the clock's and the barrier's noise, not longer than needed."""
    return max(3, min(400, 32 * MB // size))


def allreduce(rounds: int, sizes: tuple[int, ...] = SIZES, gloo: bool = True) -> Figures:
    """All-reduce (sum of float32) by size: ours from Python and from C, Gloo, and MPI_Allreduce from C."""
    import torch
    import torch.distributed as dist

    from distributed_training.bench.measure import interleave, ratio

    ranks, found = Ranks(gloo), {}
    for size in sizes:
        tensor, times = torch.zeros(size // 4), times_of(size)
        turns = {
            "ours": ranks.repeated(lambda t=tensor: dist.all_reduce(t), times),
            "ours in C": ranks.in_c(ranks.backend.timed_allreduce, tensor, times),
            "MPI_Allreduce": ranks.in_c(ranks.extension.plain_allreduce, tensor, times),
        }
        if gloo:
            few = max(3, times // 20)
            turns["Gloo"] = ranks.repeated(lambda t=tensor: dist.all_reduce(t, group=ranks.gloo), few)
        measured = interleave(turns, rounds, warmup=2)
        found[str(size)] = {f"{name}, ms": one.median * 1e3 for name, one in measured.items()} | {
            "spread": measured["ours"].spread,
            **({"to Gloo": ratio(measured, "Gloo", "ours")} if gloo else {}),
            "to MPI_Allreduce": ratio(measured, "MPI_Allreduce", "ours"),
            "in C, to MPI_Allreduce": ratio(measured, "MPI_Allreduce", "ours in C"),
        }
    return found


def gpu(rounds: int) -> Figures:
    """All-reduce of what lies on one GPU that both ranks use: ours and Gloo. NCCL refuses two ranks on one GPU."""
    import torch
    import torch.distributed as dist

    from distributed_training.bench.measure import interleave, ratio

    ranks, found = Ranks(device="cuda:0"), {}
    for size in SIZES:
        tensor, times = torch.zeros(size // 4, device="cuda"), times_of(size)

        def waited(group: Any, value: Any = tensor) -> None:
            dist.all_reduce(value, group=group)
            torch.cuda.synchronize()

        turns = {
            "ours": ranks.repeated(lambda w=waited: w(ranks.ours), times),
            "Gloo": ranks.repeated(lambda w=waited: w(ranks.gloo), max(3, times // 10)),
        }
        measured = interleave(turns, rounds, warmup=2)
        found[str(size)] = {f"{name}, ms": one.median * 1e3 for name, one in measured.items()} | {
            "spread": measured["ours"].spread,
            "to Gloo": ratio(measured, "Gloo", "ours"),
        }
    return found


def hosts(rounds: int) -> Figures:
    """All-reduce between two machines, a rank on each."""
    return allreduce(rounds, ACROSS, gloo=False)


def int8(rounds: int) -> Figures:
    """All-reduce over a slow link, as it is and compressed on the wire."""
    import torch
    import torch.distributed as dist

    from distributed_training.bench.measure import interleave, ratio

    ranks = Ranks(gloo=False)
    tensor = torch.randn(SLOW // 4, generator=torch.Generator().manual_seed(ranks.rank))
    turns = {"fp32": ranks.repeated(lambda: dist.all_reduce(tensor.clone()), 1)}
    for wire in ("bf16", "int8"):
        turns[wire] = ranks.repeated(lambda w=wire: ranks.backend.allreduce_compressed(tensor.clone(), w).wait(), 1)
    measured = interleave(turns, max(3, rounds // 3))
    return {f"{name}, s": one.median for name, one in measured.items()} | {
        f"{name} to fp32": ratio(measured, "fp32", name) for name in ("bf16", "int8")
    }


def leak(rounds: int) -> Figures:
    """Resident memory of a rank before and after very many all-reduces, and half-way, so that a slow growth shows."""
    import psutil
    import torch
    import torch.distributed as dist

    Ranks(gloo=False)
    tensor, process = torch.zeros(KB), psutil.Process()

    def after(count: int) -> int:
        for i in range(count):
            work = dist.all_reduce(tensor, async_op=i % 2 == 0)
            if work is not None:
                work.wait()
        return int(process.memory_info().rss)

    before = after(MANY // 20)
    half = after(MANY // 2)
    end = after(MANY - MANY // 2)
    return {
        "before, MB": before / MB,
        "half-way, MB": half / MB,
        "after, MB": end / MB,
        "bytes an all-reduce, second half": (end - half) / (MANY / 2),
    }


def loop_ddp(model: Any, group: Any) -> Callable[[Any, Any], None]:
    """The loop of the DDP tutorial, over a group."""
    import torch.nn.functional as F
    from strategies import optimizer_of
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, process_group=group)
    optimizer = optimizer_of(model, True)

    def step(x: Any, y: Any) -> None:
        optimizer.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        optimizer.step()

    step.wrapped = wrapped  # type: ignore[attr-defined]
    return step


def loop_zero1(model: Any, group: Any) -> Callable[[Any, Any], None]:
    """DDP with torch's ZeroRedundancyOptimizer."""
    import torch
    import torch.nn.functional as F
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, process_group=group)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        process_group=group,
        parameters_as_bucket_view=True,
        lr=1e-4,
        fused=True,
    )

    def step(x: Any, y: Any) -> None:
        optimizer.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        optimizer.step()

    return step


def loop_sharded(model: Any, group: Any, keep: bool) -> Callable[[Any, Any], None]:
    """fully_shard over every layer with parameters, then the model."""
    import torch.nn.functional as F
    from strategies import optimizer_of
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, "cpu")
    for module in [*(child for child in model.children() if any(True for _ in child.parameters())), model]:
        fully_shard(module, mesh=mesh, reshard_after_forward=not keep)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # Gloo has no mean
    optimizer = optimizer_of(model, True)

    def step(x: Any, y: Any) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


LOOPS: dict[str, Callable[[Any, Any], Callable[[Any, Any], None]]] = {
    "ddp": loop_ddp,
    "zero1": loop_zero1,
    "zero2": lambda model, group: loop_sharded(model, group, keep=True),
    "zero3": lambda model, group: loop_sharded(model, group, keep=False),
}


def batches_of(name: str, rank: int, larger: int = 1) -> Any:
    """Batches of a rank for a model of benchmarks/strategies.py, so many times as large as there."""
    import torch
    from strategies import MODELS

    _, shape, classes, size = MODELS[name]
    size *= larger
    generator = torch.Generator().manual_seed(rank)
    return [
        (torch.randn(size, *shape, generator=generator), torch.randint(0, classes, (size,), generator=generator))
        for _ in range(STEPS)
    ]


def train(rounds: int, kinds: tuple[str, ...], models: tuple[str, ...]) -> Figures:
    """Loops on our backend and on Gloo, by turns."""
    import torch.distributed as dist
    from strategies import MODELS, timed

    from distributed_training.bench.measure import interleave, ratio

    ranks, found = Ranks(), {}
    for kind in kinds:
        for name in models:
            batches, make = batches_of(name, ranks.rank), MODELS[name][0]
            loops = {"ours": LOOPS[kind](make(), ranks.ours), "Gloo": LOOPS[kind](make(), ranks.gloo)}
            turns = {who: lambda s=step, b=batches: timed(s, b, dist.barrier) for who, step in loops.items()}
            measured = interleave(turns, rounds)
            found[f"{kind}, {name}"] = {f"{who}, ms a step": one.median * 1e3 for who, one in measured.items()} | {
                "spread": measured["ours"].spread,
                "to Gloo": ratio(measured, "Gloo", "ours"),
            }
    return found


def ddp(rounds: int) -> Figures:
    """DDP on our backend and on Gloo."""
    return train(rounds, ("ddp",), ("25M MLP", "small ResNet"))


def zero(rounds: int) -> Figures:
    """ZeRO 1, 2 and 3 (FSDP2) on our backend and on Gloo."""
    return train(rounds, ("zero1", "zero2", "zero3"), ("25M MLP",))


def overlap(rounds: int, larger: int = 1) -> Figures:
    """How much of the exchange hides behind the backward pass: a step, its computation alone, its exchange alone."""
    import torch
    import torch.distributed as dist
    from strategies import mlp, timed

    from distributed_training.bench.measure import interleave

    ranks = Ranks(gloo=False)
    model = mlp()
    batches, step = batches_of("25M MLP", ranks.rank, larger), loop_ddp(model, ranks.ours)
    wrapped: Any = step.wrapped  # type: ignore[attr-defined]
    gradients = [torch.zeros(p.numel()) for p in model.parameters()]

    def alone(x: Any, y: Any) -> None:
        with wrapped.no_sync():
            step(x, y)

    def exchange(x: Any, y: Any) -> None:
        for work in [dist.all_reduce(g, async_op=True) for g in gradients]:
            work.wait()

    def busy() -> float:
        return float(ranks.extension.statistics()["busy_seconds"])

    share: list[float] = []

    def whole() -> float:
        before = busy()
        seconds = timed(step, batches, dist.barrier)
        share.append((busy() - before) / STEPS / seconds)
        return seconds

    turns = {
        "step": whole,
        "computation alone": lambda: timed(alone, batches, dist.barrier),
        "exchange alone": lambda: timed(exchange, batches, dist.barrier),
    }
    measured = interleave(turns, rounds)
    middle = {name: one.median * 1e3 for name, one in measured.items()}
    hidden = middle["computation alone"] + middle["exchange alone"] - middle["step"]
    return {f"{name}, ms": value for name, value in middle.items()} | {
        "hidden, ms": hidden,
        "hidden, share of the exchange": hidden / middle["exchange alone"],
        "communication thread at work, share of the step": sorted(share)[len(share) // 2],
    }


def take_turns(side: str, folder: Path) -> None:
    """One rank of a job that shares the machine with another: takes its turn whenever the file of it appears."""
    from strategies import by_hand_horovod, mlp, take_turns, timed

    if side == "Horovod":
        import torch

        from distributed_training.runtime.allocator import keep_freed_memory

        torch.set_num_threads(1)
        keep_freed_memory()
        (step, barrier), rank = by_hand_horovod(mlp()), int(os.environ["HOROVOD_RANK"])
    else:
        import torch.distributed as dist

        ranks = Ranks(gloo=False)
        step, barrier, rank = loop_ddp(mlp(), ranks.ours), dist.barrier, ranks.rank
    batches = batches_of("25M MLP", rank)
    take_turns(side, rank, folder, lambda: timed(step, batches, barrier))


def waiting(rounds: int) -> Figures:
    """The same over a link that is the slower part, with batches that take about as long: there is time to hide."""
    return overlap(max(3, rounds // 5), larger=8)


WORKERS = {f.__name__: f for f in (allreduce, overlap, waiting, ddp, zero, gpu, hosts, int8, leak)}


def worker(name: str, rounds: int, out: Path) -> None:
    """One rank of a launch."""
    found = WORKERS[name](rounds)
    import torch.distributed as dist

    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # several owners of one process group: none need be taken down


if __name__ == "__main__":
    if sys.argv[1] == "--turns":
        take_turns(sys.argv[2], Path(sys.argv[3]))
    else:
        worker(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
