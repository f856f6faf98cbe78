"""How fast ranks on this machine talk: run in every rank, `python -m distributed_training.planning.sweep OUT STRATEGY`.

Times each operation over sizes as a step does it: after some computation, when threads that carry messages have gone to
sleep, and on what was written just before. Ranks do not come at the same moment; what counts is the time since the last
one came. Further: how much of a transfer is free beside a computation, and what a library that only waits costs one.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distributed_training.runtime.threads import keep_waits_short

SIZES = (4 << 10, 64 << 10, 1 << 20, 4 << 20, 8 << 20, 16 << 20, 64 << 20)
_OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_reduce_bf16")
_SECONDS = 0.15  # for each operation and size
_ROUNDS = 2  # in which all of them come, so that one disturbance does not meet all that is known of one
_LEAST, _MOST = 3, 20  # repetitions in a round
_STRETCHES, _STRETCH = 15, 0.1  # seconds of computation
_DISTURBED, _LIKE_A_STEP = 15, 0.2  # such stretches beside threads that look for work, and seconds of each
RESTLESS = ("horovod",)
"""Strategies whose library has threads that look for work all the time. The others' sleep until a message comes."""


def main(out: str, strategy: str, device_name: str, deadline: float) -> None:
    """Join the other ranks and measure."""
    keep_waits_short()
    from distributed_training.config import StrategyConfig
    from distributed_training.runtime.allocator import keep_freed_memory
    from distributed_training.runtime.device import choose_device
    from distributed_training.runtime.world import read_world
    from distributed_training.strategies import Place, make_strategy

    keep_freed_memory()
    world = read_world()
    device = choose_device(device_name, world.local_rank)
    work = Work(device)
    before = work.core() if strategy in RESTLESS else 0.0
    joined: Any = make_strategy(Place(device, world, StrategyConfig(name=strategy), deadline))
    try:
        found: dict[str, Any] = {"backend": joined.group.backend, "ranks": world.size}
        sweep = Sweep(joined, work, world.size)
        found["slowdown"] = sweep.slowdown(before) if before else 1.0
        found["times"] = sweep.times()
        found["overlap"] = sweep.overlap()
        if strategy in RESTLESS:
            found["message"] = sweep.message()
        if world.rank == 0:
            Path(out).write_text(json.dumps(found), encoding="utf-8")
        joined.barrier()
    finally:
        joined.teardown()


class Work:
    """A computation: matrix products."""

    def __init__(self, device: Any) -> None:
        import torch

        self.device = device
        size = 512 if device.type == "cpu" else 4096
        self._left, self._right = (torch.rand(size, size, device=device) for _ in range(2))

    def __call__(self, products: int = 1) -> None:
        """So many of them."""
        for _ in range(products):
            self._left @ self._right

    def seconds(self) -> float:
        """Of one product, by stretches of many."""
        count = max(1, int(_STRETCH / min(self._once(1) for _ in range(3))))
        return min(self._once(count) for _ in range(_STRETCHES)) / count

    def core(self, seconds: float = _STRETCHES * _STRETCH) -> float:
        """Share of the time in which a thread that computes has a core: others may want it, too.

        How fast a product is says it less well: a machine's speed drifts by more than that from second to second.
        """
        begin, own = time.monotonic(), time.thread_time()
        while time.monotonic() < begin + seconds:
            self._once(1)
        return (time.thread_time() - own) / (time.monotonic() - begin)

    def wait(self) -> None:
        """Until the device is done."""
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.device)

    def _once(self, products: int) -> float:
        self.wait()
        begin = time.perf_counter()
        self(products)
        self.wait()
        return time.perf_counter() - begin


class Sweep:
    """The measurements of ranks that are connected."""

    def __init__(self, joined: Any, work: Work, ranks: int) -> None:
        self._joined, self._work, self._ranks = joined, work, ranks
        self._horovod = joined.group.backend == "horovod"

    def times(self) -> dict[str, list[tuple[int, float]]]:
        """(bytes, seconds) by operation. Of a backend that only one strategy uses, the one that it needs."""
        operations = _OPERATIONS if self._joined.group.backend in ("gloo", "nccl") else _OPERATIONS[:1]
        found: dict[tuple[str, int], list[float]] = {(name, size): [] for name in operations for size in SIZES}
        for _ in range(_ROUNDS):
            for (name, size), seconds in found.items():
                before, call = self._operation(name, size)
                seconds += self._repeat(call, _SECONDS / _ROUNDS, before)
        return {name: [(size, statistics.median(found[name, size])) for size in SIZES] for name in operations}

    def slowdown(self, before: float) -> float:
        """How much longer a computation takes beside the library's threads; `before` them it had so much of a core.

        They are on one rank's core for a while, then on another's, and ranks wait for the one that they disturb.
        """
        import torch

        self._joined.barrier()  # from here on all ranks' stretches are at the same time
        own = [before / self._work.core(_LIKE_A_STEP) for _ in range(_DISTURBED)]
        slowest = self._joined.gather(torch.tensor([own], device=self._work.device)).amax(0)
        return max(1.0, float(slowest.median()))

    def overlap(self) -> float:
        """Share of a transfer that costs a computation beside it nothing: from both alone and both at once."""
        if self._horovod:
            return 0.0  # its threads are at work beside every computation: see slowdown
        import torch
        import torch.distributed as dist

        gradients = torch.zeros(4 << 20, device=self._work.device)

        def transfer() -> None:
            dist.all_reduce(gradients)

        took = statistics.median(self._repeat(transfer, _SECONDS, whole=True))
        counted = torch.tensor([max(1, round(took / self._work.seconds()))], device=self._work.device)
        dist.broadcast(counted, 0)
        count = int(counted)

        def both() -> None:
            under_way = dist.all_reduce(gradients, async_op=True)
            self._work(count)
            assert under_way is not None
            under_way.wait()

        def compute() -> None:
            self._work(count)

        shares = []
        for _ in range(5):  # by turns: each is compared with what was measured beside it
            alone, sent, together = (
                statistics.median(self._repeat(call, _SECONDS / 4, whole=True)) for call in (compute, transfer, both)
            )
            shares.append((alone + sent - together) / min(alone, sent))
        return max(0.0, min(1.0, statistics.median(shares)))

    def message(self) -> float:
        """Seconds that a small message costs a computation beside it, in a step that sends one now and then."""
        import torch

        library = self._joined.group.library
        gradients = [torch.zeros(1024, device=self._work.device) for _ in range(20)]

        def step(*, sends: bool) -> None:
            under_way = []
            for number, gradient in enumerate(gradients):
                self._work()
                if sends:
                    name = f"sweep.message.{number}"
                    under_way.append(library.allreduce_async_(gradient, name=name, op=library.Sum))
            for handle in under_way:
                library.synchronize(handle)

        found = []
        for _ in range(9):  # by turns: each is compared with what was measured beside it
            plain, sending = (
                statistics.median(self._repeat(functools.partial(step, sends=sends), _SECONDS, whole=True))
                for sends in (False, True)
            )
            found.append((sending - plain) / len(gradients))
        return max(0.0, statistics.median(found))

    def _operation(self, name: str, size: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """What comes before an operation, and the operation."""
        import torch
        import torch.distributed as dist

        device, ranks, library = self._work.device, self._ranks, getattr(self._joined.group, "library", None)
        numbers = size // 2 if name == "all_reduce_bf16" else size // 4  # of which as many bytes travel
        whole = torch.zeros(numbers // ranks * ranks, device=device)
        part = torch.zeros(len(whole) // ranks, device=device)

        def write() -> None:
            (part if name == "all_gather" else whole).fill_(0.0)

        def in_half() -> None:  # as strategies.compression does it
            small = whole.to(torch.bfloat16).div_(ranks)
            dist.all_reduce(small)
            whole.copy_(small)

        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: dist.all_reduce(whole),
            "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
            "broadcast": lambda: dist.broadcast(whole, 0),
            "all_reduce_bf16": in_half,
        }
        if library is not None:
            return write, lambda: library.allreduce_(whole, name=f"sweep.{size}", op=library.Sum)
        return write, calls[name]

    def _repeat(
        self, call: Callable[[], Any], seconds: float, before: Callable[[], Any] = lambda: None, whole: bool = False
    ) -> list[float]:
        """Seconds of each repetition: `whole`, or since the last rank came. All ranks do as many: rank 0 decides."""
        import torch

        begin, end = self._once(before, call)
        times = torch.tensor([max(_LEAST, min(_MOST, int(seconds / max(end - begin, 1e-6))))])
        count = int(self._joined.broadcast(times.to(self._work.device)))
        moments = [self._once(before, call) for _ in range(count)]
        own = torch.tensor([moments], dtype=torch.float64, device=self._work.device)
        begins, ends = self._joined.gather(own).unbind(2)  # of ranks, repetitions
        took = (ends - begins).mean(0) if whole else ends.mean(0) - begins.amax(0)
        return [max(0.0, float(value)) for value in took]

    def _once(self, before: Callable[[], Any], call: Callable[[], Any]) -> tuple[float, float]:
        """(begin, end) of an operation after some computation, by a clock that all processes of a machine share."""
        self._work()
        before()
        self._work.wait()
        begin = time.monotonic()
        call()
        self._work.wait()
        return begin, time.monotonic()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]))
