"""Run by pytest in every rank under mpirun: the backend over MPI with tensors of one GPU that the ranks share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distributed_training.native.mpi.group import MPIGroup
from distributed_training.runtime.world import read_world

DEVICE = torch.device("cuda", 0)


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[MPIGroup]:
    torch.cuda.set_device(DEVICE)
    group = MPIGroup(read_world(), DEVICE, 60.0, "mpi")
    yield group
    group.close()


@pytest.mark.parametrize("count", [1, 1000, 3_000_001, 40_000_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_all_reduce(count: int, dtype: torch.dtype) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    value = (torch.arange(count, device=DEVICE) % 7 + rank).to(dtype)
    expected = (torch.arange(count, device=DEVICE) % 7 * ranks + sum(range(ranks))).to(dtype)
    dist.all_reduce(value)
    assert torch.equal(value, expected)


def test_work_on_the_stream_before_and_after_is_waited_for() -> None:
    """The gradient is still being computed when it is sent, and read as soon as the wait is over."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    large = torch.randn(4096, 4096, device=DEVICE)
    for number in range(10):
        value = torch.full((2_000_000,), float(rank + number), device=DEVICE)
        for _ in range(20):
            large = (large @ large).clamp(-1, 1)
        value += large[0, 0] * 0  # not before all that
        value *= 2
        work = dist.all_reduce(value, async_op=True)
        work.wait()
        value += 1
        assert torch.equal(value, torch.full_like(value, 2.0 * (sum(range(ranks)) + number * ranks) + 1))


def test_on_another_stream() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        value = torch.full((1_000_000,), float(rank), device=DEVICE)
        dist.all_reduce(value)
        total = value.sum().item()
    assert total == 1_000_000 * sum(range(ranks))


def test_the_other_collectives() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = torch.full((1000,), float(rank), device=DEVICE)
    together = torch.empty(1000 * ranks, device=DEVICE)
    dist.all_gather_into_tensor(together, own)
    assert together.view(ranks, -1)[:, 0].tolist() == list(range(ranks))
    part = torch.empty(1000, device=DEVICE)
    dist.reduce_scatter_tensor(part, together)
    assert torch.equal(part, torch.full_like(part, float(rank * ranks)))
    sent = own + 5 if rank == 0 else torch.zeros_like(own)
    dist.broadcast(sent, 0)
    assert sent.sum().item() == 5000
    if rank == 0:
        dist.send(own + 3, 1)
    elif rank == 1:
        dist.recv(part, 0)
        assert part.sum().item() == 3000
    dist.barrier()


@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_compressed_sums_have_the_same_bits_everywhere(group: MPIGroup, wire: str) -> None:
    backend = dist.distributed_c10d._get_default_group()._get_backend(DEVICE)
    value = torch.randn(1_000_003, generator=torch.Generator().manual_seed(dist.get_rank())).to(DEVICE)
    exact = value.clone()
    dist.all_reduce(exact)
    backend.allreduce_compressed(value, wire).wait()
    assert (value - exact).abs().max().item() < 0.1
    everybody = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, value)
    assert all(torch.equal(everybody[0], other) for other in everybody)


def test_ddp_is_the_training_of_one_process() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def make() -> nn.Module:
        torch.manual_seed(0)
        layers = nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 4)
        return nn.Sequential(*layers).to(DEVICE)

    alone, shared = make(), make()
    wrapped = DistributedDataParallel(shared, device_ids=[0], bucket_cap_mb=0.3, gradient_as_bucket_view=True)
    steps = [torch.optim.SGD(m.parameters(), 0.05, 0.9) for m in (alone, shared)]
    for number in range(20):
        data = torch.randn(8 * ranks, 64, generator=torch.Generator().manual_seed(number)).to(DEVICE)
        for model, own, optimizer in ((alone, data, steps[0]), (wrapped, data[rank::ranks], steps[1])):
            optimizer.zero_grad()
            model(own).square().mean().backward()
            optimizer.step()
    for ours, reference in zip(shared.parameters(), alone.parameters()):
        torch.testing.assert_close(ours, reference, rtol=2e-4, atol=2e-5)
