"""torch DistributedDataParallel: every rank has the whole model; gradients are summed while backward goes on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from distributed_training.runtime.errors import ConfigError
from distributed_training.strategies.base import Place, StepSettings
from distributed_training.strategies.batchnorm import synchronise_batchnorm
from distributed_training.strategies.compression import compress_gradients
from distributed_training.strategies.distributed import Distributed
from distributed_training.strategies.dp import Replicas
from distributed_training.strategies.single import SingleDevice


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
        return self._ddp

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        self._gradients_travel = last
        return nullcontext() if last else self._ddp.no_sync()

    def backward(self, loss: Tensor) -> None:
        loss = loss * self.world_size  # DDP divides by it
        if self._gradients_travel:
            super().backward(loss)
        else:  # no wait to be watched
            SingleDevice.backward(self, loss)
