"""Every collective operation of the MPI backend against values computed alone.

Run by every rank: see tests/native/test_backend.py.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.native.ranks.values import (
    BITWISE,
    FLOATS,
    INTEGERS,
    MOVED,
    OPERATIONS,
    SIZES,
    close,
    everyone,
    in_rank_order,
    own,
    reduced,
    same_everywhere,
)
from torch import Tensor

pytestmark = pytest.mark.usefixtures("met")


class TestAllReduce:
    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("op", OPERATIONS)
    def test_floats(self, dtype: torch.dtype, op: str) -> None:
        kind = getattr(dist.ReduceOp, op)
        for size in SIZES:
            value = own(dist.get_rank(), size, dtype)
            dist.all_reduce(value, kind)
            expected = reduced(everyone(size, dtype), kind)
            if in_rank_order():
                assert torch.equal(value, expected), size
            else:
                close(value, expected)

    @pytest.mark.parametrize("dtype", [*INTEGERS, torch.bool])
    @pytest.mark.parametrize("op", BITWISE)
    def test_integers(self, dtype: torch.dtype, op: str) -> None:
        kind = getattr(dist.ReduceOp, op)
        for size in SIZES[:-1]:
            value = own(dist.get_rank(), size, dtype)
            dist.all_reduce(value, kind)
            values = everyone(size, dtype)
            if dtype == torch.bool and op == "SUM":
                assert torch.equal(value, functools.reduce(operator.or_, values))
            elif dtype == torch.bool and op == "PRODUCT":
                assert torch.equal(value, functools.reduce(operator.and_, values))
            else:
                assert torch.equal(value, reduced(values, kind))

    def test_complex_numbers_are_summed(self) -> None:
        for dtype in (torch.complex64, torch.complex128):
            value = own(dist.get_rank(), 1000, dtype)
            dist.all_reduce(value)
            torch.testing.assert_close(value, sum(everyone(1000, dtype)), rtol=1e-5, atol=1e-5)

    def test_what_cannot_be_reduced_is_refused_at_once(self) -> None:
        with pytest.raises(RuntimeError, match="cannot be reduced by band"):
            dist.all_reduce(torch.zeros(1), dist.ReduceOp.BAND)
        with pytest.raises(TypeError, match="can be sent but not reduced"):
            dist.all_reduce(torch.zeros(1).to(torch.float8_e5m2))

    def test_the_same_bits_on_every_rank(self) -> None:
        for size in SIZES[1:]:
            value = own(dist.get_rank(), size)
            dist.all_reduce(value)
            same_everywhere(value)

    def test_tensors_that_are_not_contiguous(self) -> None:
        whole = own(dist.get_rank(), 60).view(6, 10)
        before = whole.clone()
        part = whole.t()[2:5]
        dist.all_reduce(part)
        expected = sum(value.view(6, 10) for value in everyone(60))
        assert isinstance(expected, Tensor)
        close(part, expected.t()[2:5])
        assert torch.equal(whole[:, :2], before[:, :2])

    def test_a_parameter(self) -> None:
        weight = torch.nn.Parameter(own(dist.get_rank(), 10))
        with torch.no_grad():
            dist.all_reduce(weight)
        close(weight.detach(), sum(everyone(10)))  # type: ignore[arg-type]

    def test_many_under_way(self) -> None:
        values = [own(dist.get_rank(), 1 + 997 * i, seed=i) for i in range(40)]
        works = [dist.all_reduce(value, async_op=True) for value in values]
        for i, (work, value) in enumerate(zip(works, values)):
            assert work.wait()
            assert work.is_completed()
            assert work.is_success()
            close(value, sum(everyone(len(value), seed=i)))  # type: ignore[arg-type]

    def test_several_at_once(self) -> None:
        values = [own(dist.get_rank(), size, seed=size) for size in (1, 1000, 70_001)]
        with dist._coalescing_manager():
            for value in values:
                dist.all_reduce(value)
        for value in values:
            close(value, sum(everyone(len(value), seed=len(value))))  # type: ignore[arg-type]

    def test_a_factor_before_the_sum(self) -> None:
        value = own(dist.get_rank(), 1000)
        dist.all_reduce(value, dist._make_nccl_premul_sum(0.5))
        close(value, 0.5 * sum(everyone(1000)))  # type: ignore[arg-type]


class TestMoving:
    """Any type of elements, byte for byte."""

    @pytest.mark.parametrize("dtype", MOVED)
    def test_broadcast(self, dtype: torch.dtype) -> None:
        for root in range(dist.get_world_size()):
            for size in SIZES:
                source = own(root, size).to(dtype)
                value = source.clone() if dist.get_rank() == root else torch.zeros_like(source)
                dist.broadcast(value, root)
                assert torch.equal(value.view(torch.uint8), source.view(torch.uint8))

    @pytest.mark.parametrize("dtype", MOVED)
    def test_all_gather(self, dtype: torch.dtype) -> None:
        for size in SIZES:
            expected = [value.to(dtype).view(torch.uint8) for value in everyone(size)]
            mine = own(dist.get_rank(), size).to(dtype)
            found = [torch.zeros_like(mine) for _ in expected]
            dist.all_gather(found, mine)
            assert all(torch.equal(a.view(torch.uint8), b) for a, b in zip(found, expected))
            whole = torch.zeros(size * len(expected), dtype=dtype)
            dist.all_gather_into_tensor(whole, mine)
            assert torch.equal(whole.view(torch.uint8), torch.cat(expected))

    def test_all_gather_in_place_and_of_parts(self) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        whole = torch.zeros(ranks * 1000)
        whole[rank * 1000 : (rank + 1) * 1000] = own(rank, 1000)
        dist.all_gather_into_tensor(whole, whole[rank * 1000 : (rank + 1) * 1000])
        assert torch.equal(whole, torch.cat(everyone(1000)))
        columns = torch.zeros(50, ranks)
        dist.all_gather([columns[:, i] for i in range(ranks)], own(rank, 50))
        assert torch.equal(columns, torch.stack(everyone(50), 1))

    def test_several_at_once(self) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        outputs = [torch.zeros(ranks * size) for size in (3, 1000)]
        with dist._coalescing_manager():
            for output in outputs:
                dist.all_gather_into_tensor(output, own(rank, len(output) // ranks))
        for output in outputs:
            assert torch.equal(output, torch.cat(everyone(len(output) // ranks)))

    def test_gather_and_scatter(self) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        for root in range(ranks):
            for size in SIZES:
                expected, mine = everyone(size), own(rank, size)
                found = [torch.zeros(size) for _ in expected] if rank == root else None
                dist.gather(mine, found, root)
                assert found is None or all(torch.equal(a, b) for a, b in zip(found, expected))
                part = torch.zeros(size)
                dist.scatter(part, expected if rank == root else None, root)
                assert torch.equal(part, mine)

    def test_all_to_all(self) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        for size in (1, 1000, 300_000):
            sent = own(rank, size * ranks)
            found = torch.zeros(size * ranks)
            dist.all_to_all_single(found, sent)
            expected = torch.cat([value.view(ranks, size)[rank] for value in everyone(size * ranks)])
            assert torch.equal(found, expected)

    def test_all_to_all_of_different_sizes(self) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        rows = [
            [(i * 3 + j * 5) % 4 * 100 for j in range(ranks)] for i in range(ranks)
        ]  # i sends so many to j; some none
        sent = [torch.full((n, 2), 10.0 * rank + j) for j, n in enumerate(rows[rank])]
        wanted = [rows[i][rank] for i in range(ranks)]
        expected = [torch.full((n, 2), 10.0 * i + rank) for i, n in enumerate(wanted)]
        found = torch.zeros(sum(wanted), 2)
        dist.all_to_all_single(found, torch.cat(sent), wanted, rows[rank])
        assert torch.equal(found, torch.cat(expected))
        parts = [torch.zeros(n, 2) for n in wanted]
        dist.all_to_all(parts, sent)
        assert all(torch.equal(a, b) for a, b in zip(parts, expected))

    def test_objects(self) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        mine = {"rank": rank, "words": "x" * rank * 1000}
        found: list[Any] = [None] * ranks
        dist.all_gather_object(found, mine)
        assert [one["rank"] for one in found] == list(range(ranks))
        gathered: list[Any] | None = [None] * ranks if rank == ranks - 1 else None
        dist.gather_object(mine, gathered, ranks - 1)
        assert gathered is None or len(gathered[-1]["words"]) == (ranks - 1) * 1000
        part: list[Any] = [None]
        dist.scatter_object_list(part, [f"for {i}" for i in range(ranks)] if rank == 0 else None, 0)
        assert part == [f"for {rank}"]
        said = [mine if rank == 1 else None]
        dist.broadcast_object_list(said, 1)
        assert said == [{"rank": 1, "words": "x" * 1000}]


class TestReducing:
    @pytest.mark.parametrize("dtype", [*FLOATS, torch.int64])
    def test_reduce_scatter(self, dtype: torch.dtype) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        for size in SIZES:
            whole = reduced(everyone(size * ranks, dtype), dist.ReduceOp.SUM).view(ranks, size)
            found = torch.zeros(size, dtype=dtype)
            dist.reduce_scatter_tensor(found, own(rank, size * ranks, dtype))
            assert torch.equal(found, whole[rank])
            found.zero_()
            dist.reduce_scatter(found, list(own(rank, size * ranks, dtype).view(ranks, size)))
            assert torch.equal(found, whole[rank])

    def test_several_at_once_and_averages(self) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        outputs = [torch.zeros(size) for size in (3, 1000)]
        with dist._coalescing_manager():
            for output in outputs:
                dist.reduce_scatter_tensor(output, own(rank, len(output) * ranks), dist.ReduceOp.AVG)
        for output in outputs:
            expected = reduced(everyone(len(output) * ranks), dist.ReduceOp.AVG)
            assert torch.equal(output, expected.view(ranks, -1)[rank])

    def test_reduce_changes_the_root_only(self) -> None:
        rank = dist.get_rank()
        for root in range(dist.get_world_size()):
            value = own(rank, 5000)
            dist.reduce(value, root)
            close(value, sum(everyone(5000)) if rank == root else own(rank, 5000))  # type: ignore[arg-type]
