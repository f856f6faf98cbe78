"""One process of a measurement: `python -m distributed_training.planning.child TASK.json`, or `by_turns`.

The task names a config and batch sizes. Each batch size is trained for some steps by the real loop under a `Stopwatch`,
and what was found is written at once, so that a process that dies of a large one leaves the small ones.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from distributed_training.bench.turn_worker import Orders
from distributed_training.config import Config
from distributed_training.runtime.errors import BenchError, DistributedTrainingError, OutOfMemoryError
from distributed_training.runtime.threads import keep_waits_short

BEFORE_CAPTURED = 30  # steps: some run eagerly before a step is captured


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a process is asked to measure."""

    config: dict[str, Any]
    """All settings."""
    batches: list[int]
    """Batch sizes of a step, ascending."""
    folder: str = ""
    """Where the answer goes, unless it is given by turns."""
    name: str = "0"
    """Of the answer, where the rank does not name it; of this copy among those that run beside each other."""
    copies: int = 1
    """Processes that measure at the same time: they wait for each other before they time anything."""
    memory: bool = True
    details: bool = True
    seconds: float = 1.0
    steps: int | None = None
    warmup: int = 2


@dataclass
class Answer:
    """What a process found."""

    model: dict[str, Any] = field(default_factory=dict)
    """Facts of the model, its optimizer and the device."""
    batches: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What was measured, by batch size."""
    trouble: str = ""
    """Why larger batch sizes could not be measured."""
    settled: dict[str, str] = field(default_factory=dict)
    """Settings left at auto that training chose by a measurement, on a GPU. All batch sizes were measured with them."""


def main(file: str) -> None:
    """Measure what the task asks for."""
    keep_waits_short()
    task = Task(**json.loads(Path(file).read_text(encoding="utf-8")))
    config, data = _prepared(task)
    answer = Answer(settled=_settled(config, max(task.batches), data))
    config = config.replace(**answer.settled)
    out = Path(task.folder) / f"answer-{task.name}.json"
    for size in task.batches:
        try:
            if task.memory:
                _measure(task, config, size, data, "buffers")
            # Memory of all sizes first: what is kept while time is measured is used again later.
            what = "both" if len(task.batches) == 1 else "memory"
            answer.batches[str(size)], answer.model = _measure(
                task, config, size, data, what if task.memory else "time"
            )
        except OutOfMemoryError as error:
            if not answer.batches:
                raise
            answer.trouble = str(error)
            break
        _write(answer, out)
    for name, kept in list(answer.batches.items()):
        if not kept["step"]:
            found, facts = _measure(task, config, int(name), data, "time")
            answer.batches[name] = {**found, "peak": kept["peak"], "timeline": kept["timeline"]}
            answer.model = answer.model or facts
            _write(answer, out)


def by_turns(orders: Orders, **task: Any) -> None:
    """Measure memory of one batch size, then time some steps in every turn (a target of `TurnProcess`).

    A machine's speed drifts, by other programs or by whoever shares its cores. What a prediction is made from and what
    it is compared with are measured by turns, so that drift meets both.
    """
    wanted = Task(**task)
    config, data = _prepared(wanted)
    (size,) = wanted.batches
    if wanted.memory:
        _measure(wanted, config, size, data, "buffers")
    _measure(wanted, config, size, data, "both" if wanted.memory else "time", orders)


def _prepared(task: Task) -> tuple[Config, Any]:
    """The settings and the data."""
    from distributed_training.runtime.imports import import_object
    from distributed_training.strategies import STRATEGIES
    from distributed_training.training.job import load_data

    config = Config.from_dict(_escaped(task.config))
    data = load_data(config)
    import_object(STRATEGIES[config.chosen_strategy().name], "strategy.name")  # libraries are no memory of the training
    return config, data


def _settled(config: Config, size: int, data: Any) -> dict[str, str]:
    """What training with this batch size puts in the place of settings left at auto.

    Each size by itself would come to a choice of its own, and without capture, as parts of a step are measured, to
    another one than training does: nothing could be drawn as a line between them.
    """
    from distributed_training.runtime.device import choose_device
    from distributed_training.runtime.world import read_world
    from distributed_training.training.job import build_job
    from distributed_training.training.measured import CHANNELS_LAST, PRECISION

    if choose_device(config.training.device, read_world().local_rank).type != "cuda":
        return {}
    first = config.replace(**{"training.batch_size": size, "run.stop_after_steps": 1})
    try:
        with build_job(first, run_dir=False, data=data) as job:
            job.trainer.train(job.train_data)
            chosen = {name: str(job.trainer.config.get(name)) for name in (PRECISION, CHANNELS_LAST)}
    except OutOfMemoryError:  # smaller ones may fit
        return {}
    return {name: value for name, value in chosen.items() if config.get(name) == "auto" != value}


def _write(answer: Answer, out: Path) -> None:
    out.write_text(json.dumps(asdict(answer)), encoding="utf-8")


def _escaped(values: dict[str, Any]) -> dict[str, Any]:
    from distributed_training.config.load import literal

    escaped: dict[str, Any] = literal(values)
    return escaped


def _measure(
    task: Task, config: Config, size: int, data: Any, what: str, turns: Orders | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what was found, facts of the model) of a training with this batch size.

    Args:
        what: time, memory, both, or buffers: a step in which libraries make theirs, no memory of the training.
        turns: says when to time steps.
    """
    from distributed_training.planning.model_facts import check_room, model_facts
    from distributed_training.planning.stopwatch import MEMORY_STEPS, Stopwatch
    from distributed_training.runtime.allocator import return_freed_memory
    from distributed_training.runtime.device import choose_device
    from distributed_training.runtime.meters import meter_for, process_size
    from distributed_training.runtime.world import read_world
    from distributed_training.training.job import build_job

    parts = min(config.training.gradient_accumulation, size)
    config = config.replace(**{"training.batch_size": size, "training.gradient_accumulation": parts})
    quiet = config.replace(**{"run.allocator": "default", **({"training.capture": "off"} if task.details else {})})
    device = choose_device(config.training.device, read_world().local_rank)
    timed = what in ("time", "both")
    gc.collect()
    return_freed_memory()
    base = process_size()
    watch = Stopwatch(
        meter_for(device) if what != "time" else None,
        seconds=task.seconds,
        steps=task.steps,
        warmup=task.warmup,
        details=task.details,
        timed=timed,
        memory_steps=1 if what == "buffers" else MEMORY_STEPS,
        before_timing=lambda: _begin_timing(task, config, size, device.type),
        turns=turns,
    )
    with build_job(quiet, run_dir=False, data=data) as job:
        check_room(job.trainer.model, job.trainer.optimizer, device)
        job.trainer.callbacks.append(watch)
        result = job.trainer.train(job.train_data)
        if timed and not watch.found.step:
            raise BenchError(f"the training ended after {result.steps} steps, before it was measured: {result.reason}")
        alone = job.trainer.strategy.world_size == 1
        facts = model_facts(job.trainer, job.train_data, base) if timed and alone else {}
    found = asdict(watch.found)
    if timed and task.details and device.type == "cuda" and config.training.capture != "off" and alone:
        whole = Stopwatch(None, seconds=task.seconds, warmup=BEFORE_CAPTURED, details=False)
        with build_job(config, run_dir=False, data=data) as job:
            job.trainer.callbacks.append(whole)
            job.trainer.train(job.train_data)
        found["captured_step"] = whole.found.step
    return found, facts


def _begin_timing(task: Task, config: Config, size: int, device: str) -> None:
    from distributed_training.runtime.allocator import keep_freed_memory

    if device == "cpu" and config.run.allocator == "auto":
        keep_freed_memory()
    _meet(task, size, config.run.deadline)


def _meet(task: Task, size: int, deadline: float) -> None:
    """Wait until all copies are here: what they time is how fast each is beside the others."""
    if task.copies == 1:
        return
    folder = Path(task.folder)
    (folder / f"here-{size}-{task.name}").touch()
    end = time.monotonic() + deadline
    while len(list(folder.glob(f"here-{size}-*"))) < task.copies:
        if time.monotonic() > end:
            raise BenchError(f"copy {task.name}: the other copies were not there after {deadline:g} s (run.deadline)")
        time.sleep(0.005)


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except DistributedTrainingError as mistake:  # of the user's: where it was found in here tells nobody anything
        sys.exit(f"{type(mistake).__name__}: {mistake}")
