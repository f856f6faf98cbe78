"""Large gradients summed from where they lie.

DistributedDataParallel copies every gradient into a bucket before it travels. That spares messages for the many small
ones; for one that is as good as a bucket of its own the copy is only a cost, on a CPU some per cent of a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distributed_training.runtime.errors import ModelError
from distributed_training.runtime.group import Group

LARGE = 4 << 20
"""Bytes from which the copy costs more than a message."""


class LargeGradients:
    """Sums the gradients of some parameters over all ranks while backward goes on; DDP does so for the others."""

    def __init__(self, large: dict[str, nn.Parameter], group: Group) -> None:
        """`large`: parameters by name, the same on every rank."""
        self._names, self._parameters = list(large), list(large.values())
        self._rank = group.world.rank
        # A group of its own, because how these come between DDP's buckets may differ from rank to rank.
        self._group: Any = group.further()
        self._order = list(reversed(range(len(large))))  # in which they travel, the same on every rank
        self._learned = False
        self._travels = True
        self._arrived: list[int] = []
        self._sent = 0
        self._under_way: list[Any] = []
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._ready_hook(number)) for number, p in enumerate(self._parameters)
        ]

    def begin(self, travels: bool) -> None:
        """A backward pass begins, the last of its step if the gradients travel."""
        self._travels = travels
        self._arrived, self._sent, self._under_way = [], 0, []

    def wait(self) -> None:
        """Until all of them are sums over all ranks."""
        if len(self._arrived) < len(self._order):
            unused = [name for number, name in enumerate(self._names) if number not in self._arrived]
            raise ModelError(
                f"rank {self._rank}: {', '.join(unused[:3])} got no gradient; freeze what the model does not use "
                "(requires_grad=False), or set strategy.find_unused_parameters=true"
            )
        for work in self._under_way:
            work.wait()
        self._under_way = []  # they hold the gradients, which would outlive the update by a forward pass
        if not self._learned:  # from now on in the order in which rank 0's backward came to them
            order = torch.tensor(self._arrived)
            dist.broadcast(order, 0, group=self._group)
            self._order, self._learned = order.tolist(), True

    def close(self) -> None:
        """Leave the model as it was."""
        for hook in self._hooks:
            hook.remove()

    def _ready_hook(self, number: int) -> Any:
        def ready(parameter: Tensor) -> None:
            if not self._travels:
                return
            self._arrived.append(number)
            while self._sent < len(self._order) and self._order[self._sent] in self._arrived:
                self._send(self._parameters[self._order[self._sent]])
                self._sent += 1

        return ready

    def _send(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        if not parameter.grad.is_contiguous():
            parameter.grad = parameter.grad.contiguous()
        self._under_way.append(dist.all_reduce(parameter.grad, group=self._group, async_op=True))


def find_large(model: nn.Module, bucket_mb: float) -> dict[str, nn.Parameter]:
    """Parameters that need no bucket. At least one is left: DDP wants something to do."""
    sparse = {id(m.weight) for m in model.modules() if getattr(m, "sparse", False) and hasattr(m, "weight")}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    smallest = min(trained, key=lambda name: trained[name].nbytes, default=None)
    at_least = min(LARGE, bucket_mb * 2**20)
    # What travels is contiguous, and a fused update wants gradients to lie as their weights do.
    fit = {n: p for n, p in trained.items() if p.is_contiguous() and id(p) not in sparse}
    return {n: p for n, p in fit.items() if p.nbytes >= at_least and n != smallest}


@contextlib.contextmanager
def left_out(model: nn.Module, large: dict[str, nn.Parameter]) -> Iterator[None]:
    """A DDP made inside leaves the large ones alone; the model keeps no mark of it."""
    members = {id(p) for p in large.values()}
    names = [name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in members]
    names += [f".{name}" for name in names if "." not in name]  # as DDP calls those of the model itself
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    try:
        yield
    finally:
        del model._ddp_params_and_buffers_to_ignore
