"""Learning rates that lie on the device, so that a recorded step reads those of today."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.optim import Optimizer

_OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


class DeviceRates:
    """The learning rates of an optimizer as tensors."""

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._all = torch.zeros(len(optimizer.param_groups), device=device)
        self._rates = list(self._all.unbind())
        self._last: list[float] = []
        self.usable = type(optimizer) in _OPTIMIZERS
        """Whether the optimizer takes its rates from the device."""

    def set(self) -> None:
        """Bring the rates of the optimizer's groups to the device, if they have changed."""
        rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        if rates == self._last:
            return
        self._last = rates
        if len(set(rates)) == 1:  # as with a schedule: one launch
            self._all.fill_(rates[0])
            return
        for tensor, rate in zip(self._rates, rates):
            tensor.fill_(rate)

    @contextmanager
    def on_device(self, capturable: bool = False) -> Iterator[None]:
        """The optimizer reads its learning rates from the device."""
        if not self.usable:
            yield
            return
        groups = self._optimizer.param_groups
        kept = [group["lr"] for group in groups]
        flags = [group.get("capturable") for group in groups]
        try:
            for group, rate in zip(groups, self._rates):
                group["lr"] = rate
                if capturable and group.get("capturable") is not None:
                    group["capturable"] = True
            yield
        finally:
            for group, rate, flag in zip(groups, kept, flags):
                group["lr"] = rate
                if flag is not None:
                    group["capturable"] = flag
