"""What torch builds on a backend (DDP and its hooks, ZeroRedundancyOptimizer, FSDP2, checkpoints) on ours and on Gloo.

Run by every rank: see tests/native/test_backend.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.native.ranks.meeting import meet
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel


@pytest.fixture(scope="module", autouse=True)
def gloo() -> Iterator[dist.ProcessGroup]:
    """The same ranks on Gloo, to compare with."""
    meet()
    group = dist.new_group(backend="gloo")
    yield group
    dist.barrier()
    dist.destroy_process_group()


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 256), nn.BatchNorm1d(256), nn.Tanh(), nn.Linear(256, 256), nn.Linear(256, 10))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(16, 32, generator=generator), torch.randint(0, 10, (16,), generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> None:
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def ddp(group: dist.ProcessGroup | None, hook: Any = None, state: Any = None) -> list[Tensor]:
    """Weights after a few steps, with several buckets."""
    model = DistributedDataParallel(make(), process_group=group, bucket_cap_mb=0.1)
    if hook is not None:
        model.register_comm_hook(state, hook)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    return [p.detach().clone() for p in model.parameters()]


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def one_at_a_time(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with types
    future = powerSGD_hook.powerSGD_hook(state, bucket)
    future.wait()
    return future


def test_ddp(gloo: dist.ProcessGroup) -> None:
    assert_close(ddp(None), ddp(gloo), 1e-6)


def test_hooks_of_ddp(gloo: dist.ProcessGroup) -> None:
    exact = ddp(gloo)
    assert_close(ddp(None, default_hooks.allreduce_hook), exact, 1e-6)
    fp16 = ddp(None, default_hooks.fp16_compress_hook)
    assert_close(fp16, exact, 5e-3)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    assert_close(ddp(None, one_at_a_time, state), exact, 0.5)


def test_zero_redundancy_optimizer(gloo: dist.ProcessGroup) -> None:
    def weights(group: dist.ProcessGroup | None) -> list[Tensor]:
        model = DistributedDataParallel(make(), process_group=group)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, process_group=group, lr=0.1, momentum=0.9
        )
        train(model, optimizer)
        optimizer.consolidate_state_dict(0)
        return [p.detach().clone() for p in model.parameters()]

    assert_close(weights(None), weights(gloo), 1e-6)


def sharded() -> nn.Sequential:
    model = make()
    for layer in (model[0], model[3]):
        fully_shard(layer)
    fully_shard(model)
    return model


def test_fully_shard_and_its_checkpoints(gloo: dist.ProcessGroup, tmp_path: Path) -> None:
    model = sharded()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    found = [p.full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]
    assert_close(found, ddp(gloo), 1e-5)

    said = [tmp_path]
    dist.broadcast_object_list(said, 0)
    folder = said[0] / "checkpoint"
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    other = sharded()
    dcp.load({"model": other.state_dict()}, checkpoint_id=folder)
    again = [p.full_tensor() for p in other.parameters()]  # type: ignore[attr-defined]
    assert all(torch.equal(a, b) for a, b in zip(again, found))


def test_dtensor() -> None:
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    whole = torch.arange(96.0).view(12, 8)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(rows.redistribute(mesh, [Shard(1)]).full_tensor(), whole)
    product = distribute_tensor(whole, mesh, [Shard(1)]) @ distribute_tensor(whole.t(), mesh, [Shard(0)])
    torch.testing.assert_close(product.full_tensor(), whole @ whole.t())
