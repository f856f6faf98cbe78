"""What else a backend has: messages between two ranks, groups, futures, compression, and what it costs.

Run by every rank: see tests/native/test_backend.py.
"""

from __future__ import annotations

import gc
import resource
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.native.ranks.values import ALL, SIZES, backend, close, everyone, memory_only, own, same_everywhere
from torch import Tensor

from distributed_training.native.build import load_extension

pytestmark = pytest.mark.usefixtures("met")


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
        dist.barrier()  # or what a quick rank sends in the next test would be taken for one of these

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
