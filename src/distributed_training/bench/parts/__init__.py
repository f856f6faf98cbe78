"""The parts of `dtrain bench`: one file each, with `run(options) -> PartResult`, imported when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distributed_training.config.check import did_you_mean
from distributed_training.config.errors import ConfigError

if TYPE_CHECKING:
    from distributed_training.bench.figures import PartResult
    from distributed_training.bench.options import BenchOptions


@dataclass(frozen=True)
class Part:
    """One part by name. What it cannot measure here it says by `BenchError` or `MissingDependencyError`."""

    name: str
    measures: str
    """One line for `dtrain bench list`."""

    def load(self) -> Callable[[BenchOptions], PartResult]:
        """Its `run`."""
        run: Callable[[BenchOptions], PartResult] = importlib.import_module(f"{__name__}.{self.name}").run
        return run


PARTS: dict[str, Part] = {
    part.name: part
    for part in (
        Part("overhead", "our loop beside a raw loop, accelerate, Lightning, Fabric and transformers' Trainer"),
        Part("precision", "fp32, tf32, fp16 and bf16, with and without compile: time, speed-up, final loss"),
        Part("scaling", "throughput, speed-up and efficiency over processes or GPUs, strong and weak"),
        Part("strategies", "single, ddp, zero, deepspeed, horovod, mpi, accelerate: speed, memory, bytes on the wire"),
        Part("loading", "loader workers 0 to N, pinned or not, local against split"),
        Part("feed", "batches from another process or machine: MB/s and samples/s, by carrier"),
        Part("checkpoint", "saving and loading: time the loop loses, MB/s"),
    )
}


def part_named(name: str) -> Part:
    """The part of that name."""
    if name not in PARTS:
        raise ConfigError(f"no part of the benchmark is named {name!r}{did_you_mean(name, PARTS)} ({', '.join(PARTS)})")
    return PARTS[name]
