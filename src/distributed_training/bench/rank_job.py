"""A training of several ranks that takes turns with others: started once by our launcher, asleep between its turns."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from distributed_training.config import Config
from distributed_training.runtime.errors import BenchError
from distributed_training.strategies import needs
from distributed_training.verify.running import end_program, last_lines, start_program

_ENDING = 20.0  # seconds for ranks that were told that there is no more to do
_LONGEST = 5000  # steps of a turn, however short they are

FORCED: dict[str, Any] = {
    "training.epochs": 1_000_000,
    "training.warmup_epochs": 0.0,
    "training.schedule": "constant",
    "training.type": "auto",  # the strategy is named
    "data.drop_last": True,
    "checkpoint.resume": "never",
    "checkpoint.every_epochs": 0,
    "checkpoint.every_steps": None,
    "early_stopping.enabled": False,
    "tracking.trackers": [],
    "run.progress": "off",
    "run.stop_after_steps": None,
}
"""Settings that make any config a training that goes on until it is told to stop and writes nothing."""


@dataclass(frozen=True, kw_only=True)
class RankTask:
    """What a job trains, and on how many ranks."""

    name: str
    config: Config
    ranks: int
    threads: int | None = None
    """Threads of each rank on the CPU; None leaves them as they are."""
    in_memory: bool = False
    """Keep computed samples in memory, so that making them is not measured."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the ranks."""

    @property
    def launcher(self) -> str:
        """Who starts the ranks: ours, except where a library insists on its own."""
        wanted = needs(self.config.strategy.name).launcher
        return "dtrain" if wanted == "torchrun" else wanted


class RankJob:
    """The running job. Give it turns; it is over with `close`, or when this process is gone."""

    def __init__(self, task: RankTask, timeout: float) -> None:
        self.task, self._timeout = task, timeout
        self._folder = Path(tempfile.mkdtemp(prefix="dtrain-bench-"))
        self._orders: list[int] = []
        self._number = 0
        self._closed = False
        try:
            self._process = self._start()
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        try:
            self.facts = self._answers()[0]
            """What rank 0 said of itself: ranks, parameters, device, threads."""
        except BaseException:
            self.close()
            raise

    def _start(self) -> subprocess.Popen[bytes]:
        task = self.task
        body = {"config": task.config.to_dict(), "in_memory": task.in_memory}
        (self._folder / "job.json").write_text(json.dumps(body), encoding="utf-8")
        for rank in range(task.ranks):
            os.mkfifo(self._folder / f"orders-{rank}")
            # Open for both: opening does not wait for the rank, and only when we are gone does it read an end.
            self._orders.append(os.open(self._folder / f"orders-{rank}", os.O_RDWR))
        variables = dict(task.variables)
        if task.config.training.device == "cpu":
            variables["DS_ACCELERATOR"] = "cpu"  # DeepSpeed would look for GPUs when it is imported
        if task.threads is not None:
            variables["OMP_NUM_THREADS"] = str(task.threads)
        program = ["-m", "distributed_training.bench.rank_program", str(self._folder)]
        return start_program(task.launcher, task.ranks, program, variables, self._folder / "launch")

    def turn(self, steps: int, warm: int, kind: str = "time") -> list[dict[str, Any]]:
        """Have all ranks do steps; gives what each of them found."""
        order = json.dumps({"kind": kind, "steps": steps, "warm": warm}).encode() + b"\n"
        for pipe in self._orders:
            os.write(pipe, order)
        return self._answers()

    def seconds(self, steps: int, warm: int) -> float:
        """Seconds of a step in a turn: those of the slowest rank."""
        return max(found["seconds"] for found in self.turn(steps, warm)) / steps

    def steps_for(self, seconds: float, warm: int) -> int:
        """How many steps fill a turn of that length; found out by a short one."""
        return max(3, min(_LONGEST, round(seconds / self.seconds(3, warm))))

    def _answers(self) -> list[dict[str, Any]]:
        files = [self._folder / f"answer-{self._number}-{rank}.json" for rank in range(self.task.ranks)]
        self._number += 1
        deadline = time.monotonic() + self._timeout
        while not all(file.exists() for file in files):
            if self._process.poll() is not None:
                raise self._failed(f"ended with code {self._process.returncode}")
            if time.monotonic() > deadline:
                missing = [str(rank) for rank, file in enumerate(files) if not file.exists()]
                raise self._failed(f"gave no answer within {self._timeout:g} s (rank {', '.join(missing)}; --timeout)")
            time.sleep(0.01)
        return [json.loads(file.read_text(encoding="utf-8")) for file in files]

    def _failed(self, what: str) -> BenchError:
        said = last_lines(self._folder / "launch")
        ranks = f"{self.task.ranks} rank{'s' if self.task.ranks > 1 else ''}"
        return BenchError("\n    ".join([f"{self.task.name}: its job of {ranks} {what}; its last words:", *said]))

    def close(self) -> None:
        """Tell the ranks that there is no more to do, and see to it that they are gone."""
        if self._closed:
            return
        self._closed = True
        for pipe in self._orders:
            os.close(pipe)
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_ENDING if self._number > 1 else 0)
        finally:
            end_program(self._process)
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> RankJob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
