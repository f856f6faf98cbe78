"""A model divided among ranks by torch's FSDP2: which of its modules travel together, and the shards that stay here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from distributed_training.runtime.errors import ModelError
from distributed_training.runtime.group import Group
from distributed_training.strategies.gathering import gather_rows_at_rank_0, rows_of_rank
from distributed_training.strategies.update import Gradients

UNIT = 1_000_000
"""Parameters of the smallest module that is gathered by itself: smaller ones cost more in messages than they save."""

_CONTAINERS = (nn.Sequential, nn.ModuleList)
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Each element of a parameter is updated by itself, so that a shard of it can be updated as if it were the whole.
_ELEMENTWISE = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)


def find_units(model: nn.Module) -> list[nn.Module]:
    """The modules that are gathered one after the other; what is left belongs to the model as a whole.

    The parts of the outermost nn.Sequential and nn.ModuleList (blocks, layers), and large layers outside of these.
    Nothing inside such a part: experts that only some ranks call must not be gathered by themselves. No embedding: many
    models use its weight as output layer too.
    """
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    units: list[nn.Module] = []

    def visit(module: nn.Module, is_part: bool) -> None:
        if sum(p.numel() for p in module.parameters()) < UNIT:
            return
        if isinstance(module, _CONTAINERS):
            for part in module:
                visit(part, True)
        elif (is_part or isinstance(module, _LAYERS)) and _keeps_to_itself(module, uses):
            units.append(module)
        elif not type(module).__module__.startswith("torch.nn."):  # torch's own may reach into their children
            for child in module.children():
                visit(child, False)

    for child in model.children():
        visit(child, isinstance(model, _CONTAINERS))
    return units


def _keeps_to_itself(module: nn.Module, uses: Counter[int]) -> bool:
    """Whether no parameter is used outside too (tied weights): those must be there whenever the model runs."""
    own = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    return all(uses[p] == count for p, count in own.items())


def shard_model(
    model: nn.Module, group: Group, *, keep_gathered: bool, low_precision: torch.dtype | None, cpu_offload: bool
) -> list[FSDPModule]:
    """Divide the parameters of a model, the same on all ranks, in place. Gives the units, the model itself as the last.

    Args:
        keep_gathered: parameters gathered for the forward pass stay until the backward pass is done with them.
        low_precision: what parameters are rounded to for the forward and backward pass.
        cpu_offload: shards live in CPU memory.
    """
    scalars = [name for name, p in model.named_parameters() if p.ndim == 0]
    if scalars:
        raise ModelError(
            f"parameter {scalars[0]} is a single number without dimensions, which torch's FSDP cannot divide: "
            "give it the shape (1,), or use strategy=zero1"
        )
    mesh = init_device_mesh(group.device.type, (group.world.size,))
    # Inputs stay as they are: autocast rounds them where it should, and targets among them must not be rounded.
    precision = MixedPrecisionPolicy(low_precision, torch.float32 if low_precision else None, cast_forward_inputs=False)
    offload = CPUOffloadPolicy(pin_memory=group.device.type == "cuda") if cpu_offload else OffloadPolicy()
    kind = type(model)
    units: list[Any] = [*find_units(model), model]
    for unit in units:
        # The model's own last: torch keeps what belongs to it gathered, as the backward pass begins with it.
        reshard = False if keep_gathered else None
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard, mp_policy=precision, offload_policy=offload)
        # Losses are weighted so that gradients add up: no mean over ranks, which Gloo does not know either.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    for attribute in ("__name__", "__qualname__", "__module__"):
        # torch gives the model a class of its own; in messages and records it is still the user's.
        setattr(type(model), attribute, getattr(kind, attribute))
    return units


class Shards(Gradients):
    """This rank's part of the parameters that an optimizer updates, of their gradients and of the optimizer's state."""

    divided = True

    def __init__(self, group: Group, model: nn.Module, optimizer: Optimizer, names: list[str]) -> None:
        """Put the shards in the place of the optimizer's parameters, which had these names. Its settings are kept.

        An optimizer that may look at a parameter as a whole gets torch's DTensors, which stand for all of it: slower,
        but it cannot mistake a shard for the parameter.
        """
        self._group, self.names = group, names
        known = dict(model.named_parameters())
        self._dtensors: list[Any] = [known[name] for name in names]
        super().__init__([nn.Parameter(d._local_tensor, requires_grad=d.requires_grad) for d in self._dtensors])
        self._plain = type(optimizer) in _ELEMENTWISE
        new = iter(self.parameters if self._plain else self._dtensors)
        for options in optimizer.param_groups:
            options["params"] = [self._replaced(optimizer, old, next(new)) for old in options["params"]]

    def _replaced(self, optimizer: Optimizer, old: Tensor, new: Tensor) -> Tensor:
        if old in optimizer.state:  # some make it before their first step
            optimizer.state[new] = {k: self.cut(v, old.shape, new) for k, v in optimizer.state.pop(old).items()}
        return new

    def collect(self) -> list[Tensor]:
        for dtensor, own in zip(self._dtensors, self.parameters):
            gradient = dtensor.grad
            own.grad = None if gradient is None else gradient._local_tensor
        return super().collect()

    def clear(self) -> None:
        super().clear()
        for dtensor in self._dtensors:
            dtensor.grad = None

    def total(self, value: Tensor) -> Tensor:
        return self._group.sum(value.to(self._group.device)).to(value.device)

    def cut_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's part of an optimizer's whole state in the portable form."""
        by_name = dict(zip(self.names, zip(self._dtensors, self.parameters if self._plain else self._dtensors)))
        parts = {}
        for name, values in state["state"].items():
            whole, own = by_name[name]
            parts[name] = {key: self.cut(value, whole.shape, own) for key, value in values.items()}
        return {**state, "state": parts}

    def cut(self, value: Any, shape: torch.Size, like: Tensor) -> Any:
        """A value of a parameter's state: divided as the parameter is, if it has a number for each of its numbers."""
        if not isinstance(value, Tensor) or value.shape != shape:
            return value
        part = own_rows(value, self._group).to(like.device)
        if not isinstance(like, DTensor):
            return part
        return DTensor.from_local(part, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())

    def gather_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """The whole of an optimizer's state at rank 0, from the parts of all ranks."""
        whole = {}
        for name, dtensor, own in zip(self.names, self._dtensors, self.parameters):
            if name in state["state"]:
                whole[name] = {k: self._gathered(v, dtensor, own) for k, v in state["state"][name].items()}
        return {**state, "state": whole}

    def _gathered(self, value: Any, dtensor: DTensor, own: Tensor) -> Any:
        if isinstance(value, DTensor) and value.placements != dtensor.placements:  # a norm, say
            return value.full_tensor().cpu()
        if isinstance(value, DTensor) or (self._plain and isinstance(value, Tensor) and value.shape == own.shape):
            return gather_rows_at_rank_0(self._group, getattr(value, "_local_tensor", value), dtensor.shape)
        return value


def own_rows(whole: Tensor, group: Group) -> Tensor:
    """This rank's part of a tensor, in memory of its own."""
    return whole[rows_of_rank(len(whole), group.world.rank, group.world.size)].clone()
