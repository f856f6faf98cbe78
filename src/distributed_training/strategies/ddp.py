"""torch DistributedDataParallel: every rank has the whole model; gradients are summed while backward goes on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from distributed_training.runtime.errors import ConfigError
from distributed_training.strategies.base import Place, StepSettings
from distributed_training.strategies.batchnorm import synchronise_batchnorm
from distributed_training.strategies.compression import compress_gradients
from distributed_training.strategies.distributed import Distributed
from distributed_training.strategies.dp import Replicas
from distributed_training.strategies.first_buckets import FirstBuckets, Sums, sum_bucket
from distributed_training.strategies.fused import use_fused
from distributed_training.strategies.large_gradients import LargeGradients, find_large, left_out
from distributed_training.strategies.single import SingleDevice
from distributed_training.strategies.update import Gradients, Update

_WORTH_A_MESSAGE = 32 << 20  # bytes of gradients that take longer to read than ranks to agree


class DDP(Distributed):
    """After the backward pass every rank holds the same gradients, so that each takes the same step."""

    name = "ddp"
    divides_among_gpus = True

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._gpus = list(place.gpus)
        if len(self._gpus) > 1 and place.config.sync_batchnorm:
            raise ConfigError("strategy.sync_batchnorm=true needs a process for each GPU; start more processes")
        self.exact = place.config.compression == "none"
        self._gradients_travel = True
        self._large: LargeGradients | None = None
        self._sums = False

    def setup(self, model: nn.Module, optimizer: Optimizer | None, settings: StepSettings) -> nn.Module:
        if self.config.sync_batchnorm:
            synchronise_batchnorm(model, self)
        self.start_alike(model)
        compiled = super().setup(model, optimizer, settings)
        if len(self._gpus) > 1:
            if settings.compile:
                raise ConfigError("training.compile=true needs a process for each GPU; start more processes")
            compiled = Replicas(compiled, device_ids=self._gpus)
        if optimizer is None:
            return compiled
        on_gpu = self.device.type == "cuda"
        large = find_large(compiled, self.config.bucket_mb) if self._without_buckets else {}
        with left_out(compiled, large) if large else nullcontext():
            self._ddp = DistributedDataParallel(
                compiled,
                device_ids=[self.device] if on_gpu else None,
                bucket_cap_mb=self.config.bucket_mb,
                gradient_as_bucket_view=True,
                static_graph=self.config.static_graph,
                find_unused_parameters=self.config.find_unused_parameters,
                init_sync=False,  # done above, with an error that a person can read
            )
        compress_gradients(self._ddp, self.config, self.group)
        self._large = LargeGradients(large, self.group) if large else None
        self._sums = self._plain and (bool(large) or self.world_size > 2)
        if self._sums:
            first = FirstBuckets(self._ddp) if self.world_size > 2 else None  # two numbers add up in any order
            self._ddp.register_comm_hook(Sums(first), sum_bucket)
        return self._ddp

    @property
    def _plain(self) -> bool:
        """Whether DDP sends its buckets as they are, all of them in every step."""
        config = self.config
        return config.compression == "none" and not config.static_graph and not config.find_unused_parameters

    @property
    def _without_buckets(self) -> bool:
        """Whether large gradients may travel from where they lie. On a GPU the copy costs nothing, and two groups at
        work at once can come to wait for each other."""
        return self._plain and self.device.type == "cpu" and self.world_size > 1

    @property
    def keeps_channels_last(self) -> bool:
        # Its buckets take gradients in the order of their weights; PowerSGD sees matrices in them.
        return type(self) is DDP and self.config.compression != "powersgd" and len(self._gpus) <= 1

    def make_update(self, optimizer: Optimizer, settings: StepSettings) -> Update:
        if settings.fused:
            use_fused(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return Update(optimizer, settings, self._scaler, SameGradients(parameters, self))

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        self._gradients_travel = last
        return nullcontext() if last else self._ddp.no_sync()

    def backward(self, loss: Tensor) -> None:
        if not self._sums:
            loss = loss * self.world_size  # DDP divides by it
        if self._large is not None:
            self._large.begin(self._gradients_travel)
        if self._gradients_travel:
            super().backward(loss)
        else:  # no wait to be watched
            SingleDevice.backward(self, loss)

    def exchange(self) -> None:
        if self._large is not None:
            self._large.wait()

    def teardown(self) -> None:
        if self._large is not None:
            self._large.close()
        super().teardown()


class SameGradients(Gradients):
    """Whole, and the same on every rank after backward: to look for what is not finite, each looks at its part."""

    def __init__(self, parameters: list[Tensor], strategy: Distributed) -> None:
        super().__init__(parameters)
        self._strategy = strategy
        self._shared = sum(p.nbytes for p in parameters if p.requires_grad) >= _WORTH_A_MESSAGE

    def checksum(self, gradients: list[Tensor]) -> float:
        if not self._shared or any(g.is_sparse for g in gradients):
            return super().checksum(gradients)
        rank, ranks = self._strategy.rank, self._strategy.world_size
        parts = [g[len(g) * rank // ranks : len(g) * (rank + 1) // ranks] if g.ndim else g for g in gradients]
        own = torch.tensor(super().checksum(parts), dtype=torch.float64)
        return float(self._strategy.reduce(own))
