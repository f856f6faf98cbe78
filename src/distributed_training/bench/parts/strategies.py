"""`dtrain bench strategies`: the same training under every strategy: speed, memory, and bytes between the ranks."""

from __future__ import annotations

from typing import Any

from distributed_training.bench.facts import cores
from distributed_training.bench.figures import Better, Figure, PartResult, Plot
from distributed_training.bench.job_config import base_config, describe, with_strategy
from distributed_training.bench.options import BenchOptions
from distributed_training.bench.rank_task import RankTask, check_processes, threads_each, throughput
from distributed_training.bench.rotation import Rotation
from distributed_training.bench.turn_process import TurnProcess
from distributed_training.config import Config
from distributed_training.runtime.device import choose_device
from distributed_training.runtime.errors import BenchError
from distributed_training.strategies import formulas, needs
from distributed_training.verify.subject import read_variant

USUAL = (
    "single",
    "ddp",
    "zero1",
    "zero2",
    "zero3",
    "deepspeed+zero_stage=1",
    "deepspeed+zero_stage=2",
    "deepspeed+zero_stage=3",
    "accelerate",
    "horovod",
    "mpi",
)
QUICK = ("single", "ddp", "zero1", "zero2", "zero3", "deepspeed", "accelerate", "horovod", "mpi")
MIB = 2**20
ABOUT = (
    "One training, one global batch, under every strategy that is installed. Throughput is of all ranks together; "
    "memory is the peak of a step in the rank that needs most, beyond what its process held before there was a model; "
    "bytes are those that one rank sends to others in a step."
)
FORMULAS = (
    "The formulas are those of docs/strategies.md: memory without activations and buffers, transfers by rings. "
    "Libraries that all-reduce where a reduce-scatter would do, as Gloo makes them on the CPU, send more."
)
_SOCKETS = {  # what makes a library use TCP between ranks of one machine, so that its bytes can be counted
    "mpi": {
        "DTRAIN_MPI_RANKS_PER_HOST": "1",
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "tcp,self",
        "OMPI_MCA_btl_tcp_if_include": "lo",
    },
    "cuda": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"},
}


def run(options: BenchOptions) -> PartResult:
    """Measure; the jobs of all strategies take turns."""
    device = choose_device(options.device).type
    ranks = _ranks(options, device)
    notes = check_processes((ranks,), device)
    config = base_config(options, device, wide=True)
    threads = threads_each(device, ranks)
    labels = options.strategies or options.variants or (QUICK if options.quick else USUAL)
    variants = [read_variant(label) for label in labels]
    tasks, skipped = {}, {}
    for variant in variants:
        need = needs(variant.strategy)
        if not need.installed:
            skipped[variant.label] = f"not installed: pip install 'distributed-training[{need.extra}]'"
            continue
        own = 1 if need.launcher == "none" else ranks
        tasks[variant.label] = RankTask(config=with_strategy(config, variant), ranks=own, threads=threads)
    if not tasks:
        raise BenchError("none of the strategies asked for is installed: " + "; ".join(skipped.values()))
    part = PartResult(name="strategies", title="Strategies", about=ABOUT)
    with Rotation(options) as rotation:
        rotation.set_up({name: task.start(memory=True) for name, task in tasks.items()})
        if not rotation.facts:
            raise BenchError("no strategy runs here: " + "; ".join(f"{k}: {v}" for k, v in rotation.failed.items()))
        speed = throughput(rotation, tasks, options)
    found, skipped = rotation.facts, skipped | rotation.failed
    wire = {name: _wire(name, tasks[name], facts["sent"], device, options) for name, facts in found.items()}
    case = f"{describe(config)}, {ranks} ranks"
    several = [name for name in speed if tasks[name].ranks > 1]
    reference = "ddp" if "ddp" in speed else next(iter([*several, *speed]))
    parameters = next(iter(found.values()))["parameters"]
    make = _Maker(case, reference)
    for name, measured in speed.items():
        make.add("throughput", name, "samples/s", measured.values)
    for name, facts in found.items():
        make.add("peak memory per rank", name, "MiB", [max(0.0, facts["peak"]) / MIB], "lower")
    for name, sent in wire.items():
        if sent is not None:
            make.add("bytes on the wire, a step and rank", name, "MiB", [sent / MIB], "lower")
    for name in found:
        task = tasks[name]
        state = formulas.state_bytes(task.config.strategy, 4 * parameters, _optimizer(config, parameters), task.ranks)
        make.add("weights, gradients and optimizer state by the formula", name, "MiB", [state / MIB], "neither")
    for name in wire:
        task = tasks[name]
        by_formula = formulas.wire_bytes(task.config.strategy, 4 * parameters, task.ranks)
        make.add("bytes on the wire by the formula", name, "MiB", [by_formula / MIB], "neither")
    part.figures, part.skipped = make.figures, skipped
    part.notes = [*notes, *_notes(config, parameters, ranks, threads, device), *rotation.notes]
    part.plots = [
        Plot(title="Throughput by strategy", quantity="throughput"),
        Plot(title="Peak memory per rank", quantity="peak memory per rank", show="values"),
        Plot(title="Bytes on the wire", quantity="bytes on the wire, a step and rank", show="values"),
    ]
    return part


def _ranks(options: BenchOptions, device: str) -> int:
    import torch

    if options.processes:
        return max(options.processes)  # `bench all --gpus 1 2 4` means its largest here
    return torch.cuda.device_count() if device == "cuda" else max(2, min(4, cores()))


class _Maker:
    """Makes the figures of one case."""

    def __init__(self, case: str, reference: str) -> None:
        self._case, self._reference = case, reference
        self.figures: list[Figure] = []

    def add(self, quantity: str, variant: str, unit: str, values: list[float], better: Better = "higher") -> None:
        common: dict[str, Any] = {"part": "strategies", "case": self._case, "quantity": quantity, "unit": unit}
        reference = self._reference if better != "neither" else None
        self.figures.append(Figure(**common, variant=variant, values=values, better=better, reference=reference))


def _wire(name: str, task: RankTask, sent: float, device: str, options: BenchOptions) -> float | None:
    """Bytes that a rank sends in a step. Where they would not go over TCP, another job is made to send them so."""
    if task.ranks == 1:
        return 0.0
    variables = _SOCKETS.get("cuda" if device == "cuda" else task.config.strategy.name)
    if variables is None:
        return sent
    options.say(f"{name}: once more over sockets, to count its bytes")
    try:
        start = task.start(memory=True, variables=variables)
        with TurnProcess(f"{name}, over sockets", start, options.timeout) as process:
            return float(process.ready()["sent"])
    except BenchError as error:
        options.say(f"{name}: its bytes are not known ({str(error).splitlines()[0]})")
        return None


def _optimizer(config: Config, parameters: int) -> int:
    """Bytes that the optimizer keeps: Adam's two averages, or one momentum."""
    averages = 2 if config.training.optimizer in ("adam", "adamw") else 1 if config.training.momentum else 0
    return 4 * parameters * averages


def _what(config: Config, parameters: int, ranks: int) -> str:
    return (
        f"{describe(config)}: {parameters:,} parameters, {config.training.optimizer}, global batch "
        f"{config.training.batch_size}, {ranks} ranks; single is one process with all of the batch."
    )


def _notes(config: Config, parameters: int, ranks: int, threads: int | None, device: str) -> list[str]:
    notes = [
        _what(config, parameters, ranks),
        "Bytes are counted by the system on every TCP connection of a rank (TCP_INFO), over three steps. "
        + (
            "NCCL was made to use sockets for it, in a job of its own."
            if device == "cuda"
            else "Ranks of mpi share memory on one machine, so theirs were counted in a job made to use sockets."
        ),
        FORMULAS,
    ]
    if device == "cpu" and threads is not None:
        notes.append(f"Every rank has {threads} thread{'s' if threads > 1 else ''}, that of single too.")
        notes.append("Memory is what is resident, with freed memory given back at once while it is measured.")
    else:
        notes.append("Memory is what torch's allocator gave out; NCCL's own buffers are not in it.")
    return notes
