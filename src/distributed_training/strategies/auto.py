"""`strategy=auto`: the strategy that fits the devices and the launcher found, with the reason."""

from __future__ import annotations

import logging

import torch

from distributed_training.strategies.base import Place

logger = logging.getLogger(__name__)

# Launchers of a library of their own mean that library; all others start plain ranks.
_OF_LAUNCHER = {"horovodrun": "horovod", "accelerate": "accelerate"}


def choose_strategy(place: Place) -> str:
    """The name of a strategy; the reason goes to the log in one line."""
    world = place.world
    if world.size > 1 or world.launcher in _OF_LAUNCHER:
        name = _OF_LAUNCHER.get(world.launcher, "ddp")
        reason = f"{world.launcher} started {world.size} process{'es' if world.size > 1 else ''}"
        if world.launcher == "mpirun" and place.device.type == "cpu":  # between GPUs NCCL is faster
            name, reason = _over_mpi(place, reason)
    elif len(place.gpus) > 1:
        name, reason = "dp", f"one process with {len(place.gpus)} GPUs"
    else:
        name, reason = "single", f"one process on {place.device}"
        gpus = torch.cuda.device_count() if place.device.type == "cuda" else 0
        if gpus > 1:
            reason += f" (there are {gpus} GPUs: `dtrain launch --nproc {gpus} -- train ...` uses all of them)"
    if world.rank == 0 and (name != "single" or "GPUs" in reason):
        logger.info("strategy %s: %s", name, reason)
    return name


def _over_mpi(place: Place, reason: str) -> tuple[str, str]:
    """mpi where it is known to work, or where nothing else can. All ranks come to the same answer."""
    if place.world.master is None:
        return "mpi", f"{reason} on several machines, and MPI tells them where they meet"
    if place.world.local_size < place.world.size:  # another machine may have other builds
        return "ddp", f"{reason} and MASTER_ADDR is set (strategy=mpi exchanges by MPI)"
    from distributed_training.native.build import find_built

    if find_built() is not None:
        return "mpi", f"{reason}, and the MPI backend is built"
    return "ddp", f"{reason} (`dtrain native build`, once, makes strategy=mpi the choice: it is faster)"
