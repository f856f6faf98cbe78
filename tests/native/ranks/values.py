"""What the checks of the MPI backend share: values that every rank can compute, what is expected of them."""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# More ranks than cores are slow, and what the kernels do with types and operations does not depend on the ranks.
ALL = os.environ.get("OMPI_COMM_WORLD_SIZE") == "2"
SIZES = [0, 1, 1000, 70_001, 1_500_007] if ALL else [0, 1, 70_001, 700_001]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16] if ALL else [torch.float32, torch.bfloat16]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64] if ALL else [torch.int64]
OPERATIONS = ["SUM", "AVG", "MIN", "MAX", "PRODUCT"] if ALL else ["SUM", "AVG", "MAX"]
BITWISE = ["SUM", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR"] if ALL else ["SUM", "BOR"]
TYPES = [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.float8_e5m2]
MOVED = TYPES if ALL else [torch.float32, torch.bool]


def own(rank: int, size: int, dtype: torch.dtype = torch.float32, *, seed: int = 0) -> Tensor:
    """What a rank brings: every rank can compute it for every other."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype == torch.bool:
        return torch.randint(0, 2, (size,), generator=generator).bool()
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.randint(0, 5, (size,), generator=generator).to(dtype)
    if dtype.is_complex:
        return torch.randn(size, generator=generator, dtype=dtype)
    return torch.randn(size, generator=generator).to(dtype)


def everyone(size: int, dtype: torch.dtype = torch.float32, *, seed: int = 0) -> list[Tensor]:
    return [own(rank, size, dtype, seed=seed) for rank in range(dist.get_world_size())]


def reduced(values: list[Tensor], op: Any) -> Tensor:
    """In the order of ranks, half precision in float32 and rounded once, as the backend promises."""
    half = values[0].dtype in (torch.float16, torch.bfloat16)
    wide = [value.float() if half else value for value in values]
    steps: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
        dist.ReduceOp.SUM: operator.add,
        dist.ReduceOp.AVG: operator.add,
        dist.ReduceOp.PRODUCT: operator.mul,
        dist.ReduceOp.MIN: torch.minimum,
        dist.ReduceOp.MAX: torch.maximum,
        dist.ReduceOp.BAND: operator.and_,
        dist.ReduceOp.BOR: operator.or_,
        dist.ReduceOp.BXOR: operator.xor,
    }
    result = functools.reduce(steps[op], wide)
    if op == dist.ReduceOp.AVG:
        result = result / len(values) if result.is_floating_point() else result // len(values)
    return result.to(values[0].dtype)


def same_everywhere(value: Tensor) -> None:
    """The same bits on every rank: seen by other means than those under test."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    assert all(one == found[0] for one in found)


def close(found: Tensor, expected: Tensor) -> None:
    """Hosts add up among themselves first, so that the order is not always that of ranks."""
    if found.dtype in (torch.float16, torch.bfloat16):
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=6e-2)
    else:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def backend() -> Any:
    """The object behind torch's default group."""
    return dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))


def memory_only() -> bool:
    """Whether all ranks are on one host and use its memory."""
    topology = backend().topology()
    return bool(topology["hosts"] == 1 and topology["shared_memory"])


def in_rank_order() -> bool:
    """Whether sums are made in the order of ranks: not where each of several hosts adds up its own first."""
    return backend().topology()["hosts"] in (1, dist.get_world_size())
