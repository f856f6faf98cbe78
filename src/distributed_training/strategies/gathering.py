"""Tensors that lie on several ranks, brought to rank 0: for state that is saved, where only rank 0 needs the whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from distributed_training.runtime.group import Group


def rows_of_rank(rows: int, rank: int, ranks: int) -> slice:
    """The rows that a rank has of a tensor divided by rows: as many for each as for the first, as long as they last."""
    most = -(-rows // ranks)
    return slice(min(rank * most, rows), min((rank + 1) * most, rows))


def gather_rows_at_rank_0(group: Group, own: Tensor, shape: Sequence[int]) -> Tensor | None:
    """A tensor of which each rank has some rows, whole in rank 0's CPU memory. The others only send: None there."""
    world = group.world
    with group.watch.waiting("gathering state at rank 0"):
        if world.rank:
            if own.numel():
                dist.send(own.detach().to(group.device).contiguous(), 0)
            return None
        whole = torch.empty(tuple(shape), dtype=own.dtype, device=group.device)
        whole[rows_of_rank(shape[0], 0, world.size)] = own.detach()
        for rank in range(1, world.size):
            part = whole[rows_of_rank(shape[0], rank, world.size)]
            if part.numel():
                dist.recv(part, rank)
    return whole.cpu()


def fetch_to_rank_0(group: Group, source: int, own: Tensor | None, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """A tensor that one rank has, in rank 0's memory. Elsewhere the answer is not looked at."""
    rank = group.world.rank
    if source == 0 or rank not in (0, source):
        return own if own is not None else torch.empty(0)
    with group.watch.waiting(f"state of rank {source}"):
        if rank == source:
            assert own is not None
            dist.send(own.detach().to(group.device).contiguous(), 0)
            return own
        received = torch.empty(tuple(shape), dtype=dtype, device=group.device)
        dist.recv(received, source)
    return received.cpu()
