"""Jobs of several ranks that take turns: all of them asleep but one, or each started anew where they do not all fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from distributed_training.bench.facts import cores
from distributed_training.bench.options import BenchOptions
from distributed_training.bench.rank_job import RankJob, RankTask
from distributed_training.runtime.errors import BenchError, ConfigError

_WARM = 2  # steps at the beginning of each turn that are not measured
_WARM_FRESH = 5  # where the job is new
_MEMORY_STEPS = (3, 3)  # measured, warm
_TURN, _QUICK_TURN = 3.0, 0.5  # seconds
_SHARE = 0.6  # of the free memory that sleeping jobs may take
_RESTLESS = ("horovodrun",)  # their processes talk to each other also while there is nothing to do


class Contest:
    """The jobs of one comparison by name. Use it in `with`: all of them are ended at its end.

    A job that cannot run is not an error: `skipped` names it with its reason.
    """

    def __init__(self, tasks: Mapping[str, RankTask], options: BenchOptions) -> None:
        self.tasks, self._options = dict(tasks), options
        self.skipped: dict[str, str] = {}
        self.facts: dict[str, dict[str, Any]] = {}
        """What rank 0 of each job said of itself."""
        self.found: dict[str, list[dict[str, Any]]] = {}
        """Peak memory and traffic of a step in each rank of each job, where they were asked for."""
        self.fresh = options.fresh
        """Whether every turn has a job of its own."""
        self._running: dict[str, RankJob] = {}
        self._steps: dict[str, int] = {}
        self._stack = ExitStack()

    def start(self, *, memory: bool = False) -> None:
        """Start every job once and find out how many steps make a turn, and before that perhaps its memory."""
        for number, (name, task) in enumerate(list(self.tasks.items())):
            self._options.say(f"starting {name} ({number + 1} of {len(self.tasks)})")
            try:
                job = self._job(name)
                self.facts[name] = job.facts
                if memory:  # what is kept while time is measured would be used again, and look as if it were needed
                    self.found[name] = job.turn(*_MEMORY_STEPS, kind="memory")
                self._steps[name] = job.steps_for(_QUICK_TURN if self._options.quick else _TURN, _WARM)
            except BenchError as error:
                self.skipped[name] = _short(str(error))
                self._options.say(f"{name} cannot run here: {_short(str(error))}")
                self._forget(name)
                continue
            if not self._kept(task):
                self._forget(name)
            elif number == 0 and not self._room(job):
                self._options.say("the jobs do not all fit into memory at once: each turn starts its job anew")
                self.fresh = True
                self._forget(name)

    @property
    def names(self) -> list[str]:
        """The jobs that run here."""
        return [name for name in self.tasks if name not in self.skipped]

    def throughput(self, name: str) -> float:
        """Samples a second in one turn."""
        job = self._job(name)
        warm = _WARM if self._kept(self.tasks[name]) else _WARM_FRESH
        seconds = job.seconds(self._steps[name], warm)
        if not self._kept(self.tasks[name]):
            self._forget(name)
        return self.tasks[name].config.training.batch_size / seconds

    def turns(self) -> dict[str, Callable[[], float]]:
        """A turn of each job, for `options.interleave`."""
        return {name: lambda name=name: self.throughput(name) for name in self.names}  # type: ignore[misc]

    def memory(self, name: str) -> list[dict[str, Any]]:
        """Peak memory and traffic of a step in each rank."""
        found = self._job(name).turn(*_MEMORY_STEPS, kind="memory")
        if not self._kept(self.tasks[name]):
            self._forget(name)
        return found

    def _kept(self, task: RankTask) -> bool:
        return not self.fresh and task.launcher not in _RESTLESS

    def _job(self, name: str) -> RankJob:
        if name not in self._running:
            self._running[name] = self._stack.enter_context(RankJob(self.tasks[name], self._options.timeout))
        return self._running[name]

    def _forget(self, name: str) -> None:
        job = self._running.pop(name, None)
        if job is not None:
            job.close()

    def _room(self, first: RankJob) -> bool:
        """Whether all jobs fit into memory, if they are like the first."""
        ranks = sum(task.ranks for task in self.tasks.values() if self._kept(task))
        each = max(rank.get("resident", 0.0) for rank in first.turn(3, 0))
        return ranks * each < _SHARE * (_available() + each * first.task.ranks)

    def __enter__(self) -> Contest:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()


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


def _available() -> float:
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    return next((float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), 0.0)


def _short(text: str) -> str:
    """The line of an error that says most: the last of what a job said, which is that of the error itself."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines[1:] if "rror" in line]
    return (errors[-1] if errors else lines[0])[:300]
