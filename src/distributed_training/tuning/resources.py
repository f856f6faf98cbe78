"""What one trial takes from a Ray cluster, and whether the cluster has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distributed_training.config import TuningConfig
from distributed_training.launch.ray_cluster import amounts, check_room, nodes


@dataclass(frozen=True)
class Resources:
    """Processes of a trial, and what each takes."""

    workers: int
    bundle: dict[str, float]

    def for_ray(self) -> Any:
        """As Ray's trials ask for it. Where a trial has ranks, its own process only waits and takes nothing."""
        from ray import tune

        head: list[dict[str, float]] = [{}] if self.workers > 1 else []
        return tune.PlacementGroupFactory(head + [dict(self.bundle)] * self.workers)


def resources_of(ray: Any, tuning: TuningConfig, device: str) -> Resources:
    """What the config asks for; without a word on GPUs, one for each process if the cluster has any."""
    bundle = {"CPU": tuning.cpus_per_worker}
    gpus = tuning.gpus_per_trial
    if gpus is None:
        some = device != "cpu" and any(node.resources.get("GPU", 0) for node in nodes(ray))
        gpus = float(tuning.workers_per_trial) if some else 0.0
    if gpus:
        bundle["GPU"] = gpus / tuning.workers_per_trial
    return Resources(tuning.workers_per_trial, bundle)


def check_one_fits(ray: Any, wanted: Resources) -> None:
    """Refuse a search of which not one trial would ever start."""
    whole = {name: size * wanted.workers for name, size in wanted.bundle.items()}
    check_room(
        ray,
        wanted.workers,
        wanted.bundle,
        advice=f"one trial needs {amounts(whole)} (tuning.workers_per_trial, tuning.cpus_per_worker, "
        "tuning.gpus_per_trial): ask for less, or add nodes",
    )
