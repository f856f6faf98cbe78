"""Training loops to compare, one file for each library: ours, by hand, accelerate, Lightning, Fabric, transformers.

A file has functions `run(orders, job, device, ...)` for `turn_worker`: they train without end, one turn after another,
and report the time of each (see `base.Pace`). Each loop is at its library's defaults but for progress bars, loggers and
checkpoints, which are off: who is after speed does that much.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from distributed_training.bench.jobs import Job
from distributed_training.bench.options import BenchOptions

if TYPE_CHECKING:
    import torch

_HERE = "distributed_training.bench.loops"


@dataclass(frozen=True)
class Loop:
    """One way to train, by name."""

    name: str
    title: str
    file: str
    arguments: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the file's `run`."""
    needs: tuple[str, ...] = ()
    """Any one of these modules must be installed."""
    devices: tuple[str, ...] = ("cpu", "cuda")
    kinds: tuple[str, ...] = ("vectors", "images", "tokens")
    """Jobs that it makes sense for."""
    by_hand: bool = False
    """Whether it is what somebody would write without any library."""

    @property
    def target(self) -> str:
        """For `TurnProcess`."""
        return f"{_HERE}.{self.file}:run"

    def missing(self) -> str:
        """What would have to be installed, or nothing."""
        if not self.needs or any(importlib.util.find_spec(name) for name in self.needs):
            return ""
        return f"{self.needs[0]} is not installed"

    def unfit(self, job: Job, device: str) -> str:
        """Why it cannot be measured with this job on this device, or nothing."""
        if device not in self.devices:
            return f"needs a GPU, and this is measured on {device}"
        return "" if job.kind in self.kinds else f"means nothing for {job.kind}"


def sized(job: Job, options: BenchOptions) -> Job:
    """The job with the batch size asked for; fewer steps where it has to be quick."""
    if options.quick:
        job = replace(job, warm=max(1, job.warm // 5), steps=max(3, job.steps // 5))
    return replace(job, batch_size=options.batch_size or job.batch_size)


def process_arguments(job: Job, device: torch.device) -> dict[str, Any]:
    """What every loop's `run` is told about its job."""
    changes = {"batch_size": job.batch_size, "warm": job.warm, "steps": job.steps}
    return {"job": job.name, "changes": changes, "device": device.type, "threads": job.threads}


def _ours(name: str, title: str, device: str, **arguments: Any) -> Loop:
    kinds = ("vectors", "images") if "given" in arguments else ("vectors", "images", "tokens")
    return Loop(name, title, "ours", arguments, devices=(device,), kinds=kinds)


def _hand(name: str, title: str, *, cpu: bool = False, images: bool = False, **settings: Any) -> Loop:
    kinds = ("images",) if images else ("vectors", "images", "tokens")
    devices = ("cpu", "cuda") if cpu else ("cuda",)
    return Loop(name, title, "by_hand", settings, devices=devices, kinds=kinds, by_hand=True)


_BF16: dict[str, Any] = {"precision": "bf16", "fused": True}
_FAST: dict[str, Any] = {"precision": "fast", "fused": True}
_WHOLE: dict[str, Any] = {**_FAST, "capture": True}
_LAST: dict[str, Any] = {"images": True, "channels_last": True}

LOOPS: dict[str, Loop] = {
    loop.name: loop
    for loop in (
        Loop("ours", "Trainer at its defaults", "ours"),
        _ours("ours-batches", "Trainer, given batches as they are", "cpu", given="batches"),
        _ours("ours-eager", "Trainer, training.capture=off", "cuda", settings={"capture": "off"}),
        _ours("ours-compile", "Trainer, training.compile=true", "cuda", settings={"compile": True}),
        _hand("raw", "the loop that everybody writes", cpu=True),
        _hand("raw-fused", "with a fused optimizer", cpu=True, fused=True),
        _hand("raw-tf32", "in tf32", precision="tf32", fused=True),
        _hand("raw-bf16", "in bf16 by autocast", **_BF16),
        _hand("raw-channels-last", "in bf16, channels last", **_BF16, **_LAST),
        _hand("raw-compile", "compiled", compile="default", **_FAST),
        _hand("raw-reduce-overhead", "compiled, mode reduce-overhead", compile="reduce-overhead", **_FAST),
        _hand("captured", "the whole step as one CUDA graph", **_WHOLE),
        _hand("captured-channels-last", "the same, channels last", **_WHOLE, **_LAST),
        _hand("captured-compile", "the whole step, compiled, as one CUDA graph", compile="default", **_WHOLE),
        _hand("captured-compile-channels-last", "the same, channels last", compile="default", **_WHOLE, **_LAST),
        Loop("accelerate", "accelerate", "accelerate_loop", needs=("accelerate",)),
        Loop("lightning", "Lightning", "lightning_loop", needs=("lightning", "pytorch_lightning")),
        Loop("fabric", "Lightning Fabric", "fabric_loop", needs=("lightning", "lightning_fabric")),
        Loop("transformers", "the Trainer of transformers", "transformers_loop", needs=("transformers",)),
    )
}
