"""torch DataParallel: one process, and each of its GPUs computes a part of the batch."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distributed_training.runtime.errors import ConfigError
from distributed_training.strategies.base import Place, StepSettings
from distributed_training.strategies.single import SingleDevice


class DataParallel(SingleDevice):
    """All GPUs that the process sees. On the CPU, or with one GPU, it is `single`.

    The model lives on the first GPU and is copied to the others in every forward pass, by threads of one process: easy
    to start, but `ddp` is faster wherever it can be used.
    """

    name = "dp"
    divides_among_gpus = True

    def __init__(self, place: Place) -> None:
        if place.world.size > 1:
            raise ConfigError(
                f"strategy=dp is one process for all GPUs, but {place.world.launcher} started {place.world.size}; "
                "use strategy=ddp, or start one"
            )
        super().__init__(place)
        self._devices = list(place.gpus) or _gpus(place.device)
        if len(self._devices) > 1 and place.config.sync_batchnorm:
            raise ConfigError("strategy.sync_batchnorm=true cannot be had with strategy=dp; use strategy=ddp")

    def setup(self, model: nn.Module, optimizer: Optimizer | None, settings: StepSettings) -> nn.Module:
        if len(self._devices) > 1 and settings.compile:
            raise ConfigError("training.compile=true cannot be had with strategy=dp on several GPUs; use strategy=ddp")
        forward = super().setup(model, optimizer, settings)
        return Replicas(forward, device_ids=self._devices) if len(self._devices) > 1 else forward


class Replicas(nn.DataParallel):
    """torch's own, but for what comes back: rows are put together, and single numbers averaged by their rows.

    torch cuts a batch into parts of uneven size (13 rows on 4 GPUs are 4, 4, 4, 1), so the plain mean of the parts'
    losses would not be the loss of the batch. It also knows fewer kinds of output.
    """

    def scatter(self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[Any]) -> Any:
        parts = super().scatter(inputs, kwargs, device_ids)
        self._rows = [_rows(part) for part in zip(*parts)]
        return parts

    def gather(self, outputs: Sequence[Any], output_device: int | torch.device) -> Any:
        return put_together(outputs, self._rows, output_device)


def put_together(outputs: Sequence[Any], rows: Sequence[int], device: int | torch.device) -> Any:
    """One output from those of all replicas, which had so many rows each: tensors, or anything that holds them."""
    first = outputs[0]
    if isinstance(first, Tensor):
        if first.ndim:
            return torch.cat([output.to(device) for output in outputs])
        return torch.stack([output.to(device) * (n / sum(rows)) for output, n in zip(outputs, rows)]).sum()
    if isinstance(first, Mapping):
        # Pairs, as torch makes them: Hugging Face's outputs take them too.
        return type(first)((k, put_together([o[k] for o in outputs], rows, device)) for k in first)  # type: ignore
    if isinstance(first, (tuple, list)):
        values = [put_together(same, rows, device) for same in zip(*outputs)]
        return type(first)(*values) if hasattr(first, "_fields") else type(first)(values)
    if not hasattr(first, "__dict__"):  # None, or a number that does not depend on the rows
        return first
    whole = copy.copy(first)
    for name in vars(first):
        setattr(whole, name, put_together([getattr(output, name) for output in outputs], rows, device))
    return whole


def _gpus(device: torch.device) -> list[int]:
    """All GPUs, the process's own first: there lie the model and what comes back."""
    if device.type != "cuda":
        return []
    own = device.index or 0
    return [own, *(number for number in range(torch.cuda.device_count()) if number != own)]


def _rows(part: Any) -> int:
    return next((len(tensor) for tensor in _tensors(part) if tensor.ndim), 1)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, tuple, list)):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(inner)
