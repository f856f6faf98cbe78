"""Sums of gradients over all ranks that a resumed run takes exactly as an uninterrupted one."""

# No `from __future__ import annotations` here: DDP compares the annotations of a hook with types.

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


class FirstBuckets:
    """The first step's sums, taken in the buckets of all later ones.

    DDP starts with one bucket for all gradients of a type. After the first step it divides them, in the order in which
    they came on rank 0. Among three or more ranks the order in which numbers are added up depends on their place in a
    bucket, so a process that goes on from a checkpoint would differ in the last digits from one never interrupted.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        limits = [model.bucket_bytes_cap]
        if model.bucket_bytes_cap_default:
            limits.insert(0, dist._DEFAULT_FIRST_BUCKET_BYTES)
        self._limits = limits
        self._arrived: list[Tensor] = []
        trained = [p for p in model._module_parameters if p.requires_grad]
        self._hooks = [p.register_post_accumulate_grad_hook(self._arrived.append) for p in trained]

    def sum(self, bucket: dist.GradBucket) -> None:
        """Sum a bucket of the first step, in place."""
        places = {id(p): place for place, p in enumerate(bucket.parameters())}
        came = [places[id(p)] for p in self._arrived if id(p) in places]
        own = came[-len(places) :]  # those before are of other micro-batches
        order = torch.tensor(own, device=bucket.buffer().device)
        dist.broadcast(order, 0)
        gradients = [bucket.gradients()[place] for place in order.tolist()]
        parts, _ = dist._compute_bucket_assignment_by_size(gradients, self._limits, [False] * len(gradients))
        for part in parts:
            later = torch.cat([gradients[number].reshape(-1) for number in part])
            dist.all_reduce(later)
            for number, values in zip(part, later.split([gradients[number].numel() for number in part])):
                gradients[number].copy_(values.view_as(gradients[number]))

    def close(self) -> None:
        """The first step is over."""
        for hook in self._hooks:
            hook.remove()
        self._arrived.clear()


class Sums:
    """State of `sum_bucket`: whether the first buckets are still to come."""

    def __init__(self, first: FirstBuckets | None) -> None:
        self.first = first


def sum_bucket(state: Sums, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A bucket's sum over all ranks; DDP itself would take the mean, at the cost of two more roundings."""
    if state.first is not None:
        state.first.sum(bucket)
        if bucket.is_last():
            state.first.close()
            state.first = None
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])
