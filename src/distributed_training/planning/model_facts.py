"""What the formulas need to know of a model: its parameters, their order, what the optimizer keeps of each."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from distributed_training.data import Loader
from distributed_training.runtime.device import machine_facts
from distributed_training.runtime.errors import OutOfMemoryError
from distributed_training.strategies.precision import resolve_precision
from distributed_training.strategies.sharding import find_units
from distributed_training.training.trainer import Trainer

_COPIED = 64 << 20


def model_facts(trainer: Trainer, data: Loader, base: float) -> dict[str, Any]:
    """Facts of a model that has been trained a few steps, as plain values."""
    model, optimizer = trainer.model, trainer.optimizer
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    unit_of = {id(p): number for number, unit in enumerate(find_units(model)) for p in unit.parameters()}
    device = trainer.device
    return {
        "name": type(model).__name__,
        "names": [name for name, _ in trained],
        "shapes": [list(p.shape) for _, p in trained],
        "bytes": [p.nbytes for _, p in trained],
        "state_bytes": [_state_bytes(optimizer, p) for _, p in trained],
        "units": [unit_of.get(id(p), -1) for _, p in trained],
        "frozen_bytes": sum(p.nbytes for p in model.parameters() if not p.requires_grad),
        "buffer_bytes": sum(b.nbytes for b in model.buffers()),
        "parameters": sum(p.numel() for p in model.parameters()),
        "has_batchnorm": any(isinstance(m, nn.modules.batchnorm._NormBase) for m in model.modules()),
        "optimizer": type(optimizer).__name__,
        "precision": resolve_precision(trainer.config.training.precision, device),
        "samples": len(data.dataset),
        "process_bytes": base if device.type == "cpu" else _beside_torch(device),
        "device_memory": device_memory(device),
        "copy_rate": _copy_rate(device),
        "machine": {key: value for key, value in machine_facts(device).items() if key != "host"},
    }


def _state_bytes(optimizer: Optimizer, parameter: nn.Parameter) -> int:
    state: dict[str, Any] = optimizer.state.get(parameter, {})
    return sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))


def device_memory(device: torch.device) -> float:
    """Bytes that the device has in all."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _beside_torch(device: torch.device) -> float:
    """Bytes of a GPU that are taken, but not by torch's allocator: the driver's, its libraries', other programs'."""
    free, whole = torch.cuda.mem_get_info(device)
    return float(whole - free - torch.cuda.memory_reserved(device))


def _room(device: torch.device) -> float:
    """Bytes that are free now."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    with open("/proc/meminfo", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024.0 for line in file if line.startswith("MemAvailable"))


def check_room(model: nn.Module, optimizer: Optimizer, device: torch.device) -> None:
    """Refuse to measure a model whose weights, gradients and optimizer state alone are more than what is free."""
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    averages = 2 if "Adam" in type(optimizer).__name__ else 1
    own = sum(p.nbytes for p in model.parameters() if p.device.type != device.type)  # yet to be brought there
    needed, free = trained * (1 + averages) + own, _room(device)
    if needed > free:
        raise OutOfMemoryError(
            f"{type(model).__name__} needs another {needed / 1e9:.1f} GB for gradients and optimizer state, but on "
            f"{device} {free / 1e9:.1f} GB are free: it cannot be measured here even with one sample a step; plan on a "
            "machine with more memory, or plan a smaller model of the same kind (fewer layers) and scale by its layers"
        )


def _copy_rate(device: torch.device) -> float:
    """Bytes a second that can be copied on the device: what buckets and gathered weights cost beside the network."""
    source, target = (torch.zeros(_COPIED // 4, device=device) for _ in range(2))
    times = []
    for _ in range(5):
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return _COPIED / min(times)
