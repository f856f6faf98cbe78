"""torch's FSDP2 (`fully_shard`): weights, gradients and optimizer state are divided among the ranks.

A module's weights are gathered before it runs and given up after; each rank updates its part. The optimizer works on
plain tensors, the shards of this rank, so that its step costs what it costs on one device.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from distributed_training.runtime.errors import ConfigError, ModelError
from distributed_training.strategies.base import Place, StepSettings
from distributed_training.strategies.batchnorm import synchronise_batchnorm
from distributed_training.strategies.distributed import Distributed
from distributed_training.strategies.fused import use_fused
from distributed_training.strategies.gathering import gather_rows_at_rank_0
from distributed_training.strategies.portable import (
    check_model_state,
    check_optimizer_state,
    load_optimizer_state,
    model_state,
    optimizer_state,
    parameter_names,
)
from distributed_training.strategies.sharding import Shards, own_rows, shard_model
from distributed_training.strategies.update import Update

logger = logging.getLogger(__name__)

_LOW_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}


class FSDP(Distributed):
    """Each rank keeps 1/N of everything, and the whole of only what it computes with at the moment."""

    name = "fsdp"
    keep_gathered = False
    """Whether weights stay gathered from the forward to the backward pass: less traffic, more memory."""

    def __init__(self, place: Place) -> None:
        if place.config.compression != "none":
            raise ConfigError(
                f"strategy.compression={place.config.compression} compresses the gradients of ddp and zero1; "
                f"strategy={self.name} has no such thing: set it to none, or use training.precision=bf16"
            )
        super().__init__(place)
        self._offloads = place.config.cpu_offload and self.device.type != "cpu"
        if place.config.cpu_offload and not self._offloads and self.rank == 0:
            logger.info("strategy.cpu_offload has no effect: everything is in CPU memory already")

    def setup(self, model: nn.Module, optimizer: Optimizer | None, settings: StepSettings) -> nn.Module:
        if self.config.sync_batchnorm:
            synchronise_batchnorm(model, self)
        self._syncs, self._buffers_differ = True, False
        forward = super().setup(model, optimizer, settings)
        # The forward pass waits for other ranks too.
        forward.register_forward_pre_hook(self._forward_begins, prepend=True)
        forward.register_forward_hook(self._forward_ends)
        return forward

    def take_model(self, model: nn.Module, optimizer: Optimizer | None) -> nn.Module:
        model = model.to(self.device)
        self.start_alike(model)
        names = parameter_names(model, optimizer) if optimizer is not None else []
        unknown = set(names) - {name for name, _ in model.named_parameters()}
        if unknown:
            raise ModelError(
                f"the optimizer holds {len(unknown)} parameters that are not the model's, which strategy={self.name} "
                "cannot divide: make them part of the model"
            )
        # By their first name; tied weights have more.
        self._first_names: dict[str, str] = {}
        by_identity = {id(p): name for name, p in model.named_parameters()}
        for name, p in model.named_parameters(remove_duplicate=False):
            self._first_names[name] = by_identity[id(p)]
        self._units = self.divide(model, optimizer)
        if self.config.find_unused_parameters:
            self._reduce_unused()
        self._shards = Shards(self.group, model, optimizer, names) if optimizer is not None else None
        return model

    def divide(self, model: nn.Module, optimizer: Optimizer | None) -> list[FSDPModule]:
        """Divide the parameters among the ranks, in place. Gives the modules that are gathered by themselves."""
        return shard_model(
            model,
            self.group,
            keep_gathered=self.keep_gathered,
            low_precision=self._low_precision(model),
            cpu_offload=self._offloads,
        )

    def _reduce_unused(self) -> None:
        """Let parameters that a rank did not use count as a gradient of zero: ranks must send the same."""
        if not hasattr(self._units[0], "set_reduce_scatter_unused_params"):
            raise ConfigError(
                f"strategy.find_unused_parameters=true with strategy={self.name} needs torch 2.13; here is "
                f"{torch.__version__}: update torch, or use strategy=zero1"
            )
        for unit in self._units:
            unit.set_reduce_scatter_unused_params(True, recurse=False)

    def _low_precision(self, model: nn.Module) -> torch.dtype | None:
        """What weights are rounded to when they are gathered, which halves traffic and memory of the gathered.

        Only where autocast brings norms back to fp32, whose kernels take no mixture: not batch norm, not on the CPU.
        There weights are gathered whole, and autocast rounds them.
        """
        assert self._precision is not None
        has_statistics = any(isinstance(m, nn.modules.batchnorm._NormBase) for m in model.modules())
        if self.device.type != "cuda" or has_statistics:
            return None
        return _LOW_PRECISION.get(self._precision.name)

    def make_update(self, optimizer: Optimizer, settings: StepSettings) -> Update:
        if settings.fused:
            use_fused(optimizer)
        return Update(optimizer, settings, self._scaler, self._shards)

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        if last != self._syncs:
            self._syncs = last
            for unit in self._units:
                unit.set_requires_gradient_sync(last, recurse=False)
        return nullcontext()

    def state(self) -> dict[str, Any]:
        """Whole at rank 0, in its CPU memory; nothing elsewhere."""
        weights: dict[str, Any] = {}
        for name, value in self._own_weights().items():
            first = self._first_names.get(name, name)
            if first != name and first in weights:
                weights[name] = weights[first]
            elif isinstance(value, DTensor):
                weights[name] = gather_rows_at_rank_0(self.group, value._local_tensor, value.shape)
            else:
                weights[name] = value
        state: dict[str, Any] = {"model": weights}
        if self._update is not None and self._shards is not None:
            own = optimizer_state(self._model, self._update.optimizer, self._shards.names)
            state["optimizer"] = self._shards.gather_state(own)
        if self._scaler is not None:
            state["scaler"] = self._scaler.state_dict()
        return state if self.rank == 0 else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        own = self._own_weights()
        check_model_state(self._model, own, state["model"])
        with torch.no_grad():
            for name, value in own.items():
                if isinstance(value, DTensor):
                    value._local_tensor.copy_(own_rows(state["model"][name], self.group))
                else:
                    value.copy_(state["model"][name])
        if self._update is not None and self._shards is not None and "optimizer" in state:
            optimizer, names = self._update.optimizer, iter(self._shards.names)
            members = [[next(names) for _ in group["params"]] for group in optimizer.param_groups]
            check_optimizer_state(optimizer, members, state["optimizer"])
            part = self._shards.cut_state(state["optimizer"])
            load_optimizer_state(self._model, optimizer, part, self._shards.names)
        if self._scaler is not None and "scaler" in state:
            self._scaler.load_state_dict(dict(state["scaler"]))

    def _own_weights(self) -> dict[str, Tensor]:
        """Shards and buffers by name. What an evaluation left gathered is given up first: it would hide them."""
        for unit in self._units:
            unit.reshard()
        return model_state(self._model)

    def _forward_begins(self, *_: Any) -> None:
        if self._model.training:
            self._buffers_differ = True
        elif self._buffers_differ:  # each rank kept statistics of its own samples: rank 0's count, as under ddp
            for buffer in self._model.buffers():
                self.group.broadcast(buffer)
            self._buffers_differ = False
        self.watch.begin(f"the weights of step {self._steps}")

    def _forward_ends(self, *_: Any) -> None:
        self.watch.end()
