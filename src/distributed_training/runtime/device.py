"""Which device to compute on, and what this machine is."""

from __future__ import annotations

import os
import platform
import sys
from typing import TYPE_CHECKING, Any

from distributed_training._version import __version__
from distributed_training.runtime.errors import ConfigError

if TYPE_CHECKING:  # imported in the functions: this module must stay cheap for the command line
    import torch


def choose_device(name: str = "auto", local_rank: int = 0) -> torch.device:
    """The torch device for a setting: auto takes a GPU when there is one. Ranks on one machine take one GPU each."""
    import torch

    if name in ("auto", "cuda") and torch.cuda.is_available():
        count = torch.cuda.device_count()
        return torch.device("cuda", local_rank % count) if local_rank else torch.device("cuda")
    if name == "auto":
        return torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"training.device={name!r} is no device; try auto, cpu or cuda") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f"training.device={name!r}, but torch {torch.__version__} sees no GPU; try auto or cpu")
        if device.index is not None and device.index >= torch.cuda.device_count():
            raise ConfigError(
                f"training.device={name!r}, but there are {torch.cuda.device_count()} GPUs, from cuda:0 on"
            )
    return device


def machine_facts(device: torch.device) -> dict[str, Any]:
    """What a reader of a run needs to know of the machine it ran on."""
    import torch

    facts: dict[str, Any] = {
        "host": platform.node(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "distributed_training": __version__,
        "device": str(device),
        "cpu_cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {"gpu": properties.name, "gpu_memory_gib": round(properties.total_memory / 2**30, 1)}
        facts["cuda"] = torch.version.cuda
    return facts
