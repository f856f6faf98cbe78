"""Every operation of the MPI backend against values computed alone.

Run by every rank: see tests/native/test_backend.py.
"""

from __future__ import annotations

import functools
import gc
import operator
import os
import resource
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.native.ranks.meeting import meet
from torch import Tensor

from distributed_training.native.build import load_extension

# More ranks than cores are slow, and what the kernels do with types and operations does not depend on the ranks.
ALL = os.environ.get("OMPI_COMM_WORLD_SIZE") == "2"
SIZES = [0, 1, 1000, 70_001, 1_500_007] if ALL else [0, 1, 70_001, 700_001]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16] if ALL else [torch.float32, torch.bfloat16]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64] if ALL else [torch.int64]
OPERATIONS = ["SUM", "AVG", "MIN", "MAX", "PRODUCT"] if ALL else ["SUM", "AVG", "MAX"]
BITWISE = ["SUM", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR"] if ALL else ["SUM", "BOR"]
TYPES = [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.float8_e5m2]
MOVED = TYPES if ALL else [torch.float32, torch.bool]


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    meet()
    yield
    dist.barrier()
    dist.destroy_process_group()


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


class TestPairs:
    def test_long_tensors_that_cross(self) -> None:
        """Everybody sends before he receives: nobody may wait for the other to take it."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        size = 2_000_003
        sent, found = own(rank, size), torch.zeros(size)
        work = dist.isend(sent, (rank + 1) % ranks)
        dist.recv(found, (rank - 1) % ranks)
        work.wait()  # type: ignore[union-attr]
        assert torch.equal(found, own((rank - 1) % ranks, size))

    def test_tags_are_kept_apart(self) -> None:
        if dist.get_rank() == 0:
            for tag in (7, 3):
                dist.send(torch.full((10,), float(tag)), 1, tag=tag)
        elif dist.get_rank() == 1:
            for tag in (3, 7):
                found = torch.zeros(10)
                dist.recv(found, 0, tag=tag)
                assert torch.equal(found, torch.full((10,), float(tag)))

    def test_from_any_rank(self) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        if rank == 0:
            senders = set()
            for _ in range(ranks - 1):
                found = torch.zeros(1000)
                sender = dist.recv(found)
                assert torch.equal(found, own(sender, 1000))  # type: ignore[arg-type]
                senders.add(sender)
            assert senders == set(range(1, ranks))
        else:
            dist.send(own(rank, 1000), 0)

    def test_in_both_directions_at_once(self) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        found = torch.zeros(500_000)
        after, before = (rank + 1) % ranks, (rank - 1) % ranks
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, own(rank, 500_000), after), dist.P2POp(dist.irecv, found, before)]
        )
        for work in works:
            work.wait()
        assert torch.equal(found, own(before, 500_000))

    def test_while_a_collective_waits(self) -> None:
        """Rank 1 enters the collective only after it has received what rank 0 sends after entering it."""
        value, message = torch.ones(1_000_000), torch.zeros(1000)
        if dist.get_rank() == 1:
            dist.recv(message, 0)
            assert torch.equal(message, torch.ones(1000))
        work = dist.all_reduce(value, async_op=True)
        if dist.get_rank() == 0:
            dist.send(torch.ones(1000), 1)
        work.wait()
        assert torch.equal(value, torch.full_like(value, float(dist.get_world_size())))

    def test_another_size_is_an_error(self) -> None:
        if dist.get_rank() == 0:
            dist.send(torch.zeros(3), 1)
        elif dist.get_rank() == 1:
            with pytest.raises(ValueError, match="rank 0 sent 12 bytes, this rank expected 40"):
                dist.recv(torch.zeros(10), 0)


class TestGroups:
    def test_parts_of_the_ranks(self) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        groups = [dist.new_group(list(range(i, ranks))) for i in range(ranks)]
        for first, group in enumerate(groups):
            if rank < first:
                continue
            value = own(rank, 5000)
            dist.all_reduce(value, group=group)
            close(value, sum(everyone(5000)[first:]))  # type: ignore[arg-type]
            if ranks - first > 1:
                dist.broadcast(value, ranks - 1, group=group)
                dist.barrier(group=group)
        dist.barrier()

    def test_ranks_in_another_order(self) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        group = dist.new_group(list(reversed(range(ranks))))
        found = [torch.zeros(1) for _ in range(ranks)]
        dist.all_gather(found, torch.tensor([float(rank)]), group=group)
        assert sorted(int(value) for value in found) == list(range(ranks))

    def test_what_mpi_keeps_for_a_group_is_freed(self) -> None:
        def kept() -> float:
            return float(load_extension().statistics()["communicators"])

        found = []
        for _ in range(6):
            group = dist.new_group()
            dist.all_reduce(torch.ones(1), group=group)
            if dist.get_rank() == 0:
                dist.send(torch.ones(1), 1, group=group)
            elif dist.get_rank() == 1:
                dist.recv(torch.ones(1), 0, group=group)
            dist.destroy_process_group(group)
            del group
            gc.collect()
            found.append(kept())
        assert len(set(found[1:])) == 1, found  # the one before goes when the next is made

    def test_numbers_of_operations(self) -> None:
        before = backend()._get_sequence_number_for_group()
        dist.barrier()
        assert backend()._get_sequence_number_for_group() == before + 1
        assert backend().failure() == ""


class TestFutures:
    def test_their_value_and_what_follows(self) -> None:
        value = own(dist.get_rank(), 1000)
        future = dist.all_reduce(value, async_op=True).get_future()
        doubled = future.then(lambda done: 2 * done.value()[0])
        close(doubled.wait(), 2 * sum(everyone(1000)))  # type: ignore[arg-type]

    def test_what_follows_may_wait_for_another_operation(self) -> None:
        def again(done: Any) -> Tensor:
            value = done.value()[0]
            return dist.all_reduce(value, async_op=True).get_future().wait()[0]  # type: ignore[no-any-return]

        for _ in range(5):
            value = torch.ones(1000)
            future = dist.all_reduce(value, async_op=True).get_future().then(again).then(lambda done: done.value() + 1)
            assert torch.equal(future.wait(), torch.full((1000,), float(dist.get_world_size()) ** 2 + 1))

    def test_after_the_end(self) -> None:
        work = dist.all_reduce(torch.ones(10), async_op=True)
        work.wait()
        assert torch.equal(work.get_future().wait()[0], torch.full((10,), float(dist.get_world_size())))


class TestCompression:
    @pytest.mark.parametrize(("wire", "tolerance"), [("bf16", 2.0**-7), ("int8", 2.0**-6)])
    def test_near_to_the_sum_and_alike_everywhere(self, wire: str, tolerance: float) -> None:
        for size in [1, 255, 70_001, SIZES[-1]]:
            for average in (False, True):
                value = own(dist.get_rank(), size)
                backend().allreduce_compressed(value, wire, average=average).wait()
                expected = sum(everyone(size))
                assert isinstance(expected, Tensor)
                expected = expected / dist.get_world_size() if average else expected
                assert float((value - expected).abs().max()) <= 2 * tolerance * float(expected.abs().max())
                same_everywhere(value)

    def test_what_is_not_finite_stays_so(self) -> None:
        value = own(dist.get_rank(), 100_000)
        if dist.get_rank() == dist.get_world_size() - 1:
            value[50_000] = float("inf")
        backend().allreduce_compressed(value, "int8").wait()
        assert not torch.isfinite(value[50_000])
        assert torch.isfinite(value[:49_000]).all()

    def test_other_types_are_refused(self) -> None:
        with pytest.raises(TypeError, match="takes float32"):
            backend().allreduce_compressed(torch.zeros(3, dtype=torch.float64), "int8")
        with pytest.raises(ValueError, match="there are 'bf16' and 'int8'"):
            backend().allreduce_compressed(torch.zeros(3), "int4")


def test_nothing_grows_over_many_operations() -> None:
    """A leak of one small object an operation would show."""
    value = torch.zeros(1000)

    def many(count: int) -> None:
        for i in range(count):
            work = dist.all_reduce(value, async_op=i % 2 == 0)
            if work is not None:
                work.wait()

    many(2000 if ALL else 500)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    many(18_000 if ALL else 500)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4096  # KB; 200 bytes an operation


def test_what_the_thread_did_is_counted() -> None:
    before = load_extension().statistics()
    dist.all_reduce(torch.zeros(1000))
    dist.all_reduce(torch.zeros(1000), async_op=True).wait()
    after = load_extension().statistics()
    assert after["operations"] - before["operations"] == 2
    assert after["bytes"] - before["bytes"] == 8000
    inline = after["inline_operations"] - before["inline_operations"]
    assert inline == 1 or (inline == 0 and not memory_only())  # over MPI only where the thread was idle just then
    assert after["busy_seconds"] > 0
