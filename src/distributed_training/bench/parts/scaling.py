"""`dtrain bench scaling`: how much faster more processes or GPUs are, for a fixed batch and for a growing one."""

from __future__ import annotations

from distributed_training.bench.choosing import choose
from distributed_training.bench.facts import cores
from distributed_training.bench.figures import Figure, PartResult, Plot
from distributed_training.bench.job_config import base_config, describe, with_strategy
from distributed_training.bench.options import BenchOptions
from distributed_training.bench.rank_task import RankTask, check_processes, threads_each, throughput
from distributed_training.bench.rotation import Rotation
from distributed_training.config import Config
from distributed_training.runtime.device import choose_device
from distributed_training.runtime.errors import BenchError, ConfigError
from distributed_training.strategies import needs
from distributed_training.verify.subject import Variant, read_variant

STRONG, WEAK = "strong scaling", "weak scaling"
KINDS = {"strong": STRONG, "weak": WEAK}
"""As `--cases` names them."""
ABOUT = (
    "Samples a second of the same training on more and more processes. Strong scaling keeps the global batch, so that "
    "each process has less to do; weak scaling keeps the batch of a process, so that the global batch grows. The ratio "
    "is the speed-up; efficiency is the speed-up divided by the number of processes."
)


def run(options: BenchOptions) -> PartResult:
    """Measure; jobs of all sizes take turns."""
    device = choose_device(options.device).type
    processes = tuple(sorted(set(options.processes or _default(device))))
    if len(processes) < 2 and not options.processes:
        raise BenchError(
            f"scaling compares numbers of processes, and here is one {'GPU' if device == 'cuda' else 'core'} only; "
            "--device cpu --gpus 1 2 compares processes on the CPU"
        )
    notes = check_processes(processes, device)
    config = base_config(options, device)
    strategy = _strategy(options, config)
    threads = threads_each(device, max(processes))
    kinds = [KINDS[name] for name in choose(options.cases, KINDS, list(KINDS), "--cases")]
    tasks, wanted, skipped = _tasks(config, strategy, processes, threads, kinds)
    with Rotation(options) as rotation:
        rotation.set_up({name: task.start() for name, task in tasks.items()})
        first = _count(processes[0])
        if first in rotation.failed:
            raise BenchError(f"{first}, which all else is compared with: {rotation.failed[first]}")
        measured = throughput(rotation, tasks, options)
    part = PartResult(name="scaling", title="Scaling", about=ABOUT, skipped=skipped | rotation.failed)
    word = "GPUs" if device == "cuda" else "processes"
    for kind in kinds:
        chosen = {n: measured[wanted[kind, n]].values for n in processes if wanted.get((kind, n)) in measured}
        part.figures += _figures(f"{kind}, {describe(config)}, {strategy.label}", chosen)
    part.notes = [
        *notes,
        _what(config, rotation.facts[first]["parameters"], strategy, processes),
        *([_cpu_note(threads)] if threads is not None else []),
        *rotation.notes,
    ]
    part.plots = [
        Plot(title="Speed-up", quantity="throughput", kind="lines", xlabel=word, ideal="linear"),
        Plot(title="Efficiency", quantity="efficiency", kind="lines", show="values", xlabel=word, ideal="flat"),
        Plot(title="Throughput", quantity="throughput", kind="lines", show="values", xlabel=word),
    ]
    return part


def _default(device: str) -> tuple[int, ...]:
    """1, 2, 4, ... up to what is there."""
    import torch

    most = torch.cuda.device_count() if device == "cuda" else cores()
    return tuple(2**power for power in range(most.bit_length()) if 2**power <= most)


def _strategy(options: BenchOptions, config: Config) -> Variant:
    if len(options.strategies) > 1:
        raise ConfigError(
            f"--strategy {','.join(options.strategies)}: scaling measures one; `dtrain bench strategies` compares them"
        )
    name = config.strategy.name
    label = options.strategies[0] if options.strategies else name if name not in ("auto", "single", "dp") else "ddp"
    chosen = read_variant(label)
    need = needs(chosen.strategy)
    if need.launcher == "none":
        raise ConfigError(f"--strategy {label} is one process: give one that has several, such as ddp")
    if not need.installed:
        raise BenchError(f"--strategy {label}: pip install 'distributed-training[{need.extra}]'")
    return chosen


def _tasks(
    config: Config, strategy: Variant, processes: tuple[int, ...], threads: int | None, kinds: list[str]
) -> tuple[dict[str, RankTask], dict[tuple[str, int], str], dict[str, str]]:
    """(jobs by name, the job of each kind and size, what cannot be measured). The smallest serves both kinds."""
    tasks: dict[str, RankTask] = {}
    wanted: dict[tuple[str, int], str] = {}
    skipped: dict[str, str] = {}
    smallest, batch = processes[0], config.training.batch_size
    for count in processes:
        for kind in kinds:
            name = _name(kind, count, smallest)
            size = batch if kind == STRONG else batch * count // smallest
            if size < count:
                skipped[name] = f"a batch of {size} cannot be divided among {count}: give a larger --batch-size"
                continue
            wanted[kind, count] = name
            own = with_strategy(config, strategy if count > 1 else read_variant("single"))
            own = own.replace(**{"training.batch_size": size})
            tasks[name] = RankTask(config=own, ranks=count, threads=threads)
    return tasks, wanted, skipped


def _name(kind: str, count: int, smallest: int) -> str:
    return _count(count) if count == smallest else f"{kind}, {_count(count)}"


def _count(count: int) -> str:
    return f"{count} process{'es' if count > 1 else ''}"


def _figures(case: str, chosen: dict[int, list[float]]) -> list[Figure]:
    smallest = min(chosen)
    figures = [
        Figure(
            part="scaling",
            case=case,
            quantity="throughput",
            variant=_count(count),
            unit="samples/s",
            values=values,
            reference=_count(smallest),
            x=count,
        )
        for count, values in chosen.items()
    ]
    for count, values in chosen.items():
        share = [value / first * smallest / count for value, first in zip(values, chosen[smallest])]
        common = {"part": "scaling", "case": case, "quantity": "efficiency"}
        figures.append(Figure(**common, variant=_count(count), unit="", values=share, x=count))  # type: ignore[arg-type]
    return figures


def _what(config: Config, parameters: int, strategy: Variant, processes: tuple[int, ...]) -> str:
    alone = " One process is strategy=single, without any communication." if processes[0] == 1 else ""
    return (
        f"{describe(config)}: {parameters:,} parameters, batch {config.training.batch_size} on "
        f"{_count(processes[0])}, {strategy.label}; validation, checkpoints and trackers off.{alone}"
    )


def _cpu_note(threads: int) -> str:
    return (
        f"On the CPU every process has {threads} thread{'s' if threads > 1 else ''}, however many processes there are: "
        "a single process could use more, but then the cores and not the processes would be compared."
    )
