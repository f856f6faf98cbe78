"""Which device to compute on, and what this machine is."""

from __future__ import annotations

import logging
import os
import platform
import sys
from typing import TYPE_CHECKING, Any

from distributed_training._version import __version__
from distributed_training.runtime.errors import ConfigError

if TYPE_CHECKING:  # imported in the functions: this module must stay cheap for the command line
    import torch

    from distributed_training.runtime.world import World

logger = logging.getLogger(__name__)


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


def choose_devices(name: str, num_gpus: int | None, world: World) -> tuple[torch.device, tuple[int, ...]]:
    """(device, all GPUs) of a process that may use several: no GPUs on the CPU, or where `name` is one of them.

    Left out, `num_gpus` is one under a launcher, and all in a process alone.
    """
    import torch

    if num_gpus is not None and num_gpus < 0:
        raise ConfigError(f"num_gpus={num_gpus}: give 0 for the CPU, or how many GPUs each process uses")
    if name not in ("auto", "cuda") or num_gpus == 0 or not torch.cuda.is_available():
        device = choose_device("cpu" if num_gpus == 0 else name, world.local_rank)
        if num_gpus and num_gpus > 1 and world.rank == 0:
            logger.warning("num_gpus=%d, but %s", num_gpus, f"training.device={name}" if name != "auto" else "no GPU")
        return device, ()
    count = torch.cuda.device_count()
    wanted = num_gpus or (count if world.launcher == "none" else 1)
    if wanted > count:
        logger.warning("%s: num_gpus=%d, but torch sees %d: using these", world.label, wanted, count)
    first = world.local_rank * wanted
    gpus = tuple((first + number) % count for number in range(min(wanted, count)))
    return torch.device("cuda", gpus[0]), gpus


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
