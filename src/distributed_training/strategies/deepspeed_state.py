"""DeepSpeed's divided state as full tensors by name, and back.

ZeRO lays the parameters of a group end to end in one flat tensor and gives each rank a stretch of it, in fp32. What an
optimizer remembers of its parameters (momentum, averages) has the same layout.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distributed_training.strategies.portable import (
    check_model_state,
    load_optimizer_state,
    model_state,
    optimizer_state,
    parameter_names,
    weights_elsewhere,
)

Sum = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that this rank updates. It may be empty."""

    flat: Tensor
    """This rank's stretch of all parameters of the group, in fp32."""
    at: int
    """Where the part begins in `flat`."""
    start: int
    """Where the part begins in the parameter."""
    size: int
    """How many elements it has."""

    def take(self, values: Tensor, full: Tensor) -> None:
        """Copy the part out of something laid out like `flat` into the full, flattened parameter."""
        full[self.start : self.start + self.size] = values[self.at : self.at + self.size]

    def give(self, values: Tensor, full: Tensor) -> None:
        """Copy the part out of the full parameter into something laid out like `flat`."""
        values[self.at : self.at + self.size] = full.flatten()[self.start : self.start + self.size].to(values)


class Remembered:
    """A model and its optimizer before DeepSpeed takes them apart: names, shapes, who is in which group."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.shapes = {name: tensor.to("meta") for name, tensor in model_state(model).items()}
        self.groups: list[list[nn.Parameter]] = [list(group["params"]) for group in optimizer.param_groups]
        self.names = parameter_names(model, optimizer)
        self.device = self.groups[0][0].device

    def parameters(self) -> Iterator[tuple[int, nn.Parameter]]:
        """(group, parameter) in the optimizer's order."""
        for number, members in enumerate(self.groups):
            for parameter in members:
                yield number, parameter

    def stand_in(self) -> Optimizer:
        """The optimizer as it was, with empty parameters in their places: for the portable form, which wants one."""
        other = copy.copy(self.optimizer)
        other.param_groups = [
            {**group, "params": [nn.Parameter(torch.empty(0)) for _ in members]}
            for group, members in zip(self.optimizer.param_groups, self.groups)
        ]
        other.state = defaultdict(dict)
        return other


class WholeState:
    """State where nothing is divided (ZeRO stage 0): each rank has all of it."""

    def __init__(self, before: Remembered) -> None:
        self._before = before

    def optimizer(self) -> dict[str, Any]:
        """The optimizer's state in the portable form."""
        return optimizer_state(self._before.model, self._before.optimizer)

    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        """Take a portable state."""
        load_optimizer_state(self._before.model, self._before.optimizer, state)

    def weights(self) -> dict[str, Tensor]:
        """The weights in the portable form."""
        return model_state(self._before.model)

    def load_weights(self, state: Mapping[str, Tensor]) -> None:
        """Take portable weights."""
        check_model_state(self._before.model, self._before.shapes, state)
        self._before.model.load_state_dict(state, strict=not weights_elsewhere(self._before.model))


class DividedState:
    """State of ZeRO stages 1 to 3. All ranks call a method together; rank 0 gets the whole, in CPU memory."""

    def __init__(self, before: Remembered, zero: Any, rank: int, add_up: Sum, library: Any) -> None:
        self._before, self._zero, self._rank, self._library = before, zero, rank, library
        self._sum = add_up

    def weights(self) -> dict[str, Tensor]:
        """The weights in fp32, gathered one by one."""
        whole: dict[int, Tensor] = {}  # tied parameters are gathered once and share their memory
        pieces = self._pieces()
        weights = {}
        for name, tensor in self._tensors():
            key = id(tensor)
            if key not in whole:
                value = self._full(tensor, pieces[key], pieces[key].flat) if key in pieces else self._held(tensor)
                whole[key] = value.cpu() if self._rank == 0 else value.new_empty(0)
            weights[name] = whole[key]
        return weights

    def load_weights(self, state: Mapping[str, Tensor]) -> None:
        """Put full weights where this rank keeps its part of them: in the model and in DeepSpeed's fp32 copy."""
        check_model_state(self._before.model, self._before.shapes, state)
        pieces = self._pieces()
        for name, tensor in self._tensors():
            with torch.no_grad(), self._gathered(tensor, modifier_rank=0):
                if self._rank == 0 or not hasattr(tensor, "ds_id"):
                    tensor.copy_(state[name])
            if id(tensor) in pieces:
                piece = pieces[id(tensor)]
                piece.give(piece.flat.data, state[name])

    def optimizer(self) -> dict[str, Any]:
        """The optimizer's state in the portable form."""
        other, pieces = self._before.stand_in(), self._pieces()
        proxies = [proxy for group in other.param_groups for proxy in group["params"]]
        for (_, parameter), proxy in zip(self._before.parameters(), proxies):
            if id(parameter) not in pieces:
                continue
            piece = pieces[id(parameter)]
            for key, value in self._before.optimizer.state.get(piece.flat, {}).items():
                if isinstance(value, Tensor) and value.shape == piece.flat.shape:
                    value = self._full(parameter, piece, value)
                    value = value.cpu() if self._rank == 0 else value.new_empty(0)
                elif isinstance(value, Tensor):  # a count of steps: each parameter's own, not one that all share
                    value = value.detach().cpu().clone()
                other.state[proxy][key] = value
        return optimizer_state(self._before.model, other, self._before.names)

    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        """Put a full state where this rank keeps its part of it."""
        other, pieces, own = self._before.stand_in(), self._pieces(), self._before.optimizer
        load_optimizer_state(self._before.model, other, state, self._before.names)
        proxies = [proxy for group in other.param_groups for proxy in group["params"]]
        own.state.clear()
        for (number, parameter), proxy in zip(self._before.parameters(), proxies):
            if id(parameter) not in pieces or not other.state.get(proxy):
                continue  # frozen, or without a gradient so far
            piece, group = pieces[id(parameter)], own.param_groups[number]
            flat_state = own.state[piece.flat]
            for key, value in other.state[proxy].items():
                if not isinstance(value, Tensor) or key == "step":
                    flat_state[key] = _later(flat_state.get(key), _placed(value, piece.flat, group))
                else:
                    piece.give(flat_state.setdefault(key, torch.zeros_like(piece.flat.data)), value)
        for group, loaded in zip(own.param_groups, other.param_groups):
            group.update({key: value for key, value in loaded.items() if key != "params"})

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What the model's state is made of."""
        left_out = weights_elsewhere(self._before.model)
        for name, tensor in self._before.model.state_dict(keep_vars=True).items():
            if isinstance(tensor, Tensor) and name not in left_out:
                yield name, tensor

    def _full(self, parameter: Tensor, piece: Piece, values: Tensor) -> Tensor:
        """The whole of something that the ranks have in parts: all others add zeros to each part."""
        shape = getattr(parameter, "ds_shape", parameter.shape)
        full = torch.zeros(shape.numel(), dtype=values.dtype, device=self._before.device)
        piece.take(values.detach(), full)
        return self._sum(full).view(shape)

    def _held(self, tensor: Tensor) -> Tensor:
        """A buffer or a frozen parameter: no part of the optimizer's, but perhaps divided all the same."""
        with self._gathered(tensor):
            return tensor.detach().clone()

    def _gathered(self, tensor: Tensor, modifier_rank: int | None = None) -> Any:
        """The whole tensor on all ranks, where ZeRO stage 3 has divided it."""
        return self._library.zero.GatheredParameters([tensor], modifier_rank, enabled=hasattr(tensor, "ds_id"))

    def _pieces(self) -> dict[int, Piece]:
        """This rank's part of every trained parameter, by the parameter's identity."""
        zero, found = self._zero, {}
        parameter: Any  # with what DeepSpeed has put on it
        for number, parameter in self._before.parameters():
            if not parameter.requires_grad:
                continue
            if hasattr(parameter, "ds_id"):
                sub_group, at, size = zero.grad_position[zero.get_param_id(parameter)]
                start = self._rank * size
                size = max(0, min(size, parameter.ds_numel - start))  # the last part may be padded
                found[id(parameter)] = Piece(zero.fp32_partitioned_groups_flat[sub_group], at, start, size)
            else:
                flat, there = zero.single_partition_of_fp32_groups[number], parameter._hp_mapping
                part = (
                    (there.hp_fragment_address.start, there.lp_fragment_address.start, there.hp_fragment_address.numel)
                    if there is not None
                    else (0, 0, 0)
                )
                found[id(parameter)] = Piece(flat, *part)
        return found


def _placed(value: Any, flat: Tensor, group: Mapping[str, Any]) -> Any:
    """A count of steps where the optimizer's kernel looks for it."""
    if not isinstance(value, Tensor):
        return value
    return value.to(flat.device, copy=True) if group.get("fused") or group.get("capturable") else value.clone()


def _later(one: Any, other: Any) -> Any:
    """Parameters in one flat tensor share a count of steps: that of those that were always trained."""
    return one if one is not None and one > other else other
