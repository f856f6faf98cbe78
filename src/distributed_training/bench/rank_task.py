"""Trainings on several ranks that are measured by turns: how they are started, and how long their turns are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from distributed_training.bench.facts import cores
from distributed_training.bench.measure import Measured
from distributed_training.bench.options import BenchOptions
from distributed_training.bench.rotation import Rotation
from distributed_training.bench.turn_process import Start
from distributed_training.config import Config
from distributed_training.runtime.errors import ConfigError
from distributed_training.strategies import needs

_TURN, _QUICK_TURN = 3.0, 0.5  # seconds
_FEWEST, _MOST = 3, 5000  # steps of a turn, however long or short they are


@dataclass(frozen=True, kw_only=True)
class RankTask:
    """What a job trains, and on how many ranks."""

    config: Config
    ranks: int
    threads: int | None = None
    """Threads of each rank on the CPU; None leaves them as they are."""

    def start(self, *, memory: bool = False, variables: Mapping[str, str] | None = None) -> Start:
        """For `Rotation`. `memory`: it also finds out what memory and traffic a step takes when it is set up."""
        own = dict(variables or {})
        if self.config.training.device == "cpu":
            own["DS_ACCELERATOR"] = "cpu"  # DeepSpeed would look for GPUs when it is imported
        if self.threads is not None:
            own["OMP_NUM_THREADS"] = str(self.threads)
        wanted = needs(self.config.strategy.name).launcher
        launcher = "dtrain" if wanted == "torchrun" else wanted  # ours, except where a library insists on its own
        arguments = {"config": self.config.to_dict(), "memory": memory}
        return Start("distributed_training.bench.rank_training:run", arguments, self.ranks, launcher, own)


def throughput(rotation: Rotation, tasks: Mapping[str, RankTask], options: BenchOptions) -> dict[str, Measured]:
    """Samples a second of the jobs that could be set up. Their turns take about the same time, not as many steps."""
    seconds = _QUICK_TURN if options.quick else _TURN
    steps = {name: round(seconds / facts["seconds"]) for name, facts in rotation.facts.items()}
    found = rotation.measure({name: {"steps": max(_FEWEST, min(_MOST, count))} for name, count in steps.items()})
    return {
        name: Measured([tasks[name].config.training.batch_size / answer["seconds"] for answer in answers])
        for name, answers in found.items()
    }


def threads_each(device: str, most: int) -> int | None:
    """Threads of each rank: the same for all jobs, so that more ranks means more cores and nothing else."""
    return max(1, cores() // most) if device == "cpu" else None


def check_processes(processes: tuple[int, ...], device: str, option: str = "--gpus") -> list[str]:
    """Refuse more ranks than there are GPUs; gives a note where cores have to be shared."""
    import torch

    most = max(processes)
    if min(processes) < 1:
        raise ConfigError(f"{option} {min(processes)}: a job has at least one process")
    if device == "cuda" and most > torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ConfigError(
            f"{option} {most}: this machine has {count} GPU{'s' if count > 1 else ''}, and ranks do not share one; "
            f"give at most {count}, or --device cpu to compare processes on the CPU"
        )
    if device == "cpu" and most > cores():
        return [
            f"{most} processes on {cores()} cores: they share cores, so that no speed-up beyond {cores()} is possible"
        ]
    return []
