"""Our MPI backend beside Gloo, plain MPI_Allreduce and Horovod, in one run.

    python benchmarks/mpi.py [allreduce] [overlap] [ddp] [zero] [horovod] [hosts] [int8] [--rounds 15]

Two ranks. What is compared takes turns in the same ranks, except Horovod, which is a job of its
own; the time of a turn is that of rank 0, and every turn begins with a barrier. `hosts` and `int8` need root: two
network namespaces are two machines there. Writes benchmarks/results/mpi.json and .md; other parts stay as they are.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
KB, MB = 1024, 1024**2
SIZES = (4 * KB, 64 * KB, 256 * KB, MB, 4 * MB, 16 * MB, 32 * MB, 128 * MB)
ACROSS = (4 * KB, 64 * KB, MB, 8 * MB, 32 * MB)  # bytes between two machines
SLOW = 4 * MB  # bytes over the slow link
RATE = "100mbit"
STEPS = 8
LAUNCHES = 3
Turn = Callable[[], float]
Figures = dict[str, Any]


# What one rank measures. All ranks do the same; rank 0's figures count.


class Ranks:
    """The ranks of a launch, on our backend and on Gloo."""

    def __init__(self, gloo: bool = True) -> None:
        import torch
        import torch.distributed as dist

        from distributed_training.native.mpi import register
        from distributed_training.native.mpi.group import MPIGroup
        from distributed_training.runtime.allocator import keep_freed_memory
        from distributed_training.runtime.world import read_world

        logging.disable(logging.WARNING)
        torch.set_num_threads(1)
        keep_freed_memory()
        self.extension = register()
        self.group = MPIGroup(read_world(), torch.device("cpu"), 300.0)
        self.ours = dist.group.WORLD
        self.gloo = dist.new_group(backend="gloo") if gloo else None
        self.backend = self.ours._get_backend(torch.device("cpu"))
        self.rank = dist.get_rank()

    def repeated(self, call: Callable[[], Any], times: int) -> Turn:
        """A turn: seconds of one call, from a barrier on."""
        import torch.distributed as dist

        def turn() -> float:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(times):
                call()
            return (time.perf_counter() - start) / times

        return turn

    def plain(self, tensor: Any, times: int) -> Turn:
        """A turn of MPI_Allreduce, called from C."""
        import torch.distributed as dist

        def turn() -> float:
            dist.barrier()
            return float(self.extension.plain_allreduce(tensor, times))

        return turn


def times_of(size: int) -> int:
    """Calls in a turn: enough to be longer than the clock's and the barrier's noise, not longer than needed."""
    return max(3, min(400, 32 * MB // size))


def allreduce(rounds: int, sizes: tuple[int, ...] = SIZES, gloo: bool = True) -> Figures:
    """All-reduce (sum of float32) by size: ours, Gloo, and MPI_Allreduce."""
    import torch
    import torch.distributed as dist

    from distributed_training.bench.measure import interleave, ratio

    ranks, found = Ranks(gloo), {}
    for size in sizes:
        tensor, times = torch.zeros(size // 4), times_of(size)
        turns = {
            "ours": ranks.repeated(lambda t=tensor: dist.all_reduce(t), times),
            "MPI_Allreduce": ranks.plain(tensor, times),
        }
        if gloo:
            few = max(3, times // 20)
            turns["Gloo"] = ranks.repeated(lambda t=tensor: dist.all_reduce(t, group=ranks.gloo), few)
        measured = interleave(turns, rounds, warmup=2)
        found[str(size)] = {f"{name}, ms": one.median * 1e3 for name, one in measured.items()} | {
            "spread": measured["ours"].spread,
            **({"to Gloo": ratio(measured, "Gloo", "ours")} if gloo else {}),
            "to MPI_Allreduce": ratio(measured, "MPI_Allreduce", "ours"),
        }
    return found


def hosts(rounds: int) -> Figures:
    """All-reduce between two machines, a rank on each."""
    return allreduce(rounds, ACROSS, gloo=False)


def int8(rounds: int) -> Figures:
    """All-reduce over a slow link, as it is and compressed on the wire."""
    import torch
    import torch.distributed as dist

    from distributed_training.bench.measure import interleave, ratio

    ranks = Ranks(gloo=False)
    tensor = torch.randn(SLOW // 4, generator=torch.Generator().manual_seed(ranks.rank))
    turns = {"fp32": ranks.repeated(lambda: dist.all_reduce(tensor.clone()), 1)}
    for wire in ("bf16", "int8"):
        turns[wire] = ranks.repeated(lambda w=wire: ranks.backend.allreduce_compressed(tensor.clone(), w).wait(), 1)
    measured = interleave(turns, max(3, rounds // 3))
    return {f"{name}, s": one.median for name, one in measured.items()} | {
        f"{name} to fp32": ratio(measured, "fp32", name) for name in ("bf16", "int8")
    }


def loop_ddp(model: Any, group: Any) -> Callable[[Any, Any], None]:
    """The loop of the DDP tutorial, over a group."""
    import torch.nn.functional as F
    from strategies import optimizer_of
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, process_group=group)
    optimizer = optimizer_of(model, True)

    def step(x: Any, y: Any) -> None:
        optimizer.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        optimizer.step()

    step.wrapped = wrapped  # type: ignore[attr-defined]
    return step


def loop_zero1(model: Any, group: Any) -> Callable[[Any, Any], None]:
    """DDP with torch's ZeroRedundancyOptimizer."""
    import torch
    import torch.nn.functional as F
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, process_group=group)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        process_group=group,
        parameters_as_bucket_view=True,
        lr=1e-4,
        fused=True,
    )

    def step(x: Any, y: Any) -> None:
        optimizer.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        optimizer.step()

    return step


def loop_sharded(model: Any, group: Any, keep: bool) -> Callable[[Any, Any], None]:
    """fully_shard over every layer with parameters, then the model."""
    import torch.nn.functional as F
    from strategies import optimizer_of
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, "cpu")
    for module in [*(child for child in model.children() if any(True for _ in child.parameters())), model]:
        fully_shard(module, mesh=mesh, reshard_after_forward=not keep)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # Gloo has no mean
    optimizer = optimizer_of(model, True)

    def step(x: Any, y: Any) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


LOOPS: dict[str, Callable[[Any, Any], Callable[[Any, Any], None]]] = {
    "ddp": loop_ddp,
    "zero1": loop_zero1,
    "zero2": lambda model, group: loop_sharded(model, group, keep=True),
    "zero3": lambda model, group: loop_sharded(model, group, keep=False),
}


def batches_of(name: str, rank: int) -> Any:
    """Batches of a rank for a model of benchmarks/strategies.py."""
    import torch
    from strategies import MODELS

    _, shape, classes, size = MODELS[name]
    generator = torch.Generator().manual_seed(rank)
    return [
        (torch.randn(size, *shape, generator=generator), torch.randint(0, classes, (size,), generator=generator))
        for _ in range(STEPS)
    ]


def train(rounds: int, kinds: tuple[str, ...], models: tuple[str, ...]) -> Figures:
    """Loops on our backend and on Gloo, by turns."""
    import torch.distributed as dist
    from strategies import MODELS, timed

    from distributed_training.bench.measure import interleave, ratio

    ranks, found = Ranks(), {}
    for kind in kinds:
        for name in models:
            batches, make = batches_of(name, ranks.rank), MODELS[name][0]
            loops = {"ours": LOOPS[kind](make(), ranks.ours), "Gloo": LOOPS[kind](make(), ranks.gloo)}
            turns = {who: lambda s=step, b=batches: timed(s, b, dist.barrier) for who, step in loops.items()}
            measured = interleave(turns, rounds)
            found[f"{kind}, {name}"] = {f"{who}, ms a step": one.median * 1e3 for who, one in measured.items()} | {
                "spread": measured["ours"].spread,
                "to Gloo": ratio(measured, "Gloo", "ours"),
            }
    return found


def ddp(rounds: int) -> Figures:
    """DDP on our backend and on Gloo."""
    return train(rounds, ("ddp",), ("25M MLP", "small ResNet"))


def zero(rounds: int) -> Figures:
    """ZeRO 1, 2 and 3 (FSDP2) on our backend and on Gloo."""
    return train(rounds, ("zero1", "zero2", "zero3"), ("25M MLP",))


def overlap(rounds: int) -> Figures:
    """How much of the exchange hides behind the backward pass: a step, its computation alone, its exchange alone."""
    import torch
    import torch.distributed as dist
    from strategies import mlp, timed

    from distributed_training.bench.measure import interleave

    ranks = Ranks(gloo=False)
    model = mlp()
    batches, step = batches_of("25M MLP", ranks.rank), loop_ddp(model, ranks.ours)
    wrapped: Any = step.wrapped  # type: ignore[attr-defined]
    gradients = [torch.zeros(p.numel()) for p in model.parameters()]

    def alone(x: Any, y: Any) -> None:
        with wrapped.no_sync():
            step(x, y)

    def exchange(x: Any, y: Any) -> None:
        for work in [dist.all_reduce(g, async_op=True) for g in gradients]:
            work.wait()

    def busy() -> float:
        return float(ranks.extension.statistics()["busy_seconds"])

    share: list[float] = []

    def whole() -> float:
        before = busy()
        seconds = timed(step, batches, dist.barrier)
        share.append((busy() - before) / STEPS / seconds)
        return seconds

    turns = {
        "step": whole,
        "computation alone": lambda: timed(alone, batches, dist.barrier),
        "exchange alone": lambda: timed(exchange, batches, dist.barrier),
    }
    measured = interleave(turns, rounds)
    middle = {name: one.median * 1e3 for name, one in measured.items()}
    hidden = middle["computation alone"] + middle["exchange alone"] - middle["step"]
    return {f"{name}, ms": value for name, value in middle.items()} | {
        "hidden, ms": hidden,
        "hidden, share of the exchange": hidden / middle["exchange alone"],
        "communication thread at work, share of the step": sorted(share)[len(share) // 2],
    }


def take_turns(side: str, folder: Path) -> None:
    """One rank of a job that shares the machine with another: takes its turn whenever the file of it appears."""
    from strategies import by_hand_horovod, mlp, timed

    if side == "Horovod":
        import torch

        from distributed_training.runtime.allocator import keep_freed_memory

        torch.set_num_threads(1)
        keep_freed_memory()
        (step, barrier), rank = by_hand_horovod(mlp()), int(os.environ["HOROVOD_RANK"])
    else:
        import torch.distributed as dist

        ranks = Ranks(gloo=False)
        step, barrier, rank = loop_ddp(mlp(), ranks.ours), dist.barrier, ranks.rank
    batches = batches_of("25M MLP", rank)
    for number in itertools.count():
        turn = folder / f"{side}-{number}"
        while not turn.exists():
            if (folder / "end").exists():
                os._exit(0)  # nothing is measured in taking the library down
            time.sleep(0.02)
        seconds = timed(step, batches, barrier)
        if rank == 0:
            (folder / "part").write_text(str(seconds))
            (folder / "part").rename(turn.with_suffix(".time"))


WORKERS = {f.__name__: f for f in (allreduce, overlap, ddp, zero, hosts, int8)}


def worker(name: str, rounds: int, out: Path) -> None:
    """One rank of a launch."""
    found = WORKERS[name](rounds)
    import torch.distributed as dist

    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # several owners of one process group: none need be taken down


# Launching them.


def command_of(name: str, rounds: int, out: Path) -> list[str]:
    """What a rank runs."""
    return [sys.executable, __file__, "--worker", name, str(rounds), str(out)]


def mpirun(words: list[str]) -> list[str]:
    """The launcher of the environment, with what every launch of ours has."""
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [str(Path(sys.executable).with_name("mpirun")), *as_root, "--bind-to", "none", "-np", "2", *words]


def variables(**more: str) -> dict[str, str]:
    """The environment of a launcher."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path, **more}


def run(command: list[str], out: Path, **more: str) -> Figures:
    """Run a launcher to its end; what rank 0 left."""
    done = subprocess.run(command, env=variables(**more), capture_output=True, text=True, timeout=3600)
    if not out.exists():
        raise RuntimeError(f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
    return dict(json.loads(out.read_text()))


def here(name: str, rounds: int, folder: Path) -> Figures:
    """Two ranks on this machine."""
    out = folder / f"{name}.json"
    return run([*mpirun(["--host", "localhost:2"]), *command_of(name, rounds, out)], out)


@contextmanager
def machines() -> Iterator[tuple[Any, Any]]:
    """Two network namespaces with a cable between them."""
    sys.path.insert(0, str(ROOT))
    from tests.launch.networks import two_machines

    with two_machines() as pair:
        yield pair


def across(name: str, rounds: int, folder: Path, rate: str | None = None) -> Figures:
    """One rank on each of two machines, over a link of this rate."""
    out, agent = folder / f"{name}.json", ROOT / "tests" / "launch" / "programs" / "agent_to_namespace.py"
    with machines() as pair:
        for machine in pair if rate else ():
            shape = f"tc qdisc add dev eth0 root tbf rate {rate} burst 64kb latency 100ms"
            subprocess.run([*machine.inside, *shape.split()], check=True, timeout=30)
        (folder / "hosts").write_text("".join(f"{machine.name} slots=1\n" for machine in pair))
        words = ["--hostfile", str(folder / "hosts"), "-x", "OMP_NUM_THREADS"]
        before = [sys.executable, str(agent), "--here", pair[0].name]
        command = [*before, *mpirun(words), *command_of(name, rounds, out)]
        return run(command, out, PRTE_MCA_plm_ssh_agent=f"{sys.executable} {agent}")


def horovod(rounds: int, folder: Path) -> Figures:
    """DDP on ours and Horovod: two jobs that are there at a time and take turns; started anew three times."""
    from distributed_training.bench.measure import Measured, interleave, ratio

    parts = []
    for number in range(LAUNCHES):
        own = folder / str(number)
        own.mkdir()
        jobs = {side: start_side(side, own) for side in ("ours", "Horovod")}
        counts = {side: itertools.count() for side in jobs}
        turns = {side: lambda s=side, o=own, j=jobs, c=counts: one_turn(s, j[s], o, next(c[s])) for side in jobs}
        try:
            parts.append(interleave(turns, max(3, rounds // LAUNCHES)))
        finally:
            (own / "end").touch()
            for job in jobs.values():
                try:
                    job.wait(30)
                except subprocess.TimeoutExpired:
                    job.kill()
    measured = {side: Measured([v for part in parts for v in part[side].values]) for side in parts[0]}
    return {f"{side}, ms a step": one.median * 1e3 for side, one in measured.items()} | {
        "spread": measured["ours"].spread,
        "to Horovod": ratio(measured, "Horovod", "ours"),
    }


def start_side(side: str, folder: Path) -> subprocess.Popen[bytes]:
    """Start one of two jobs under its own launcher."""
    program = [sys.executable, __file__, "--turns", side, str(folder)]
    horovodrun = [str(Path(sys.executable).with_name("horovodrun")), "-np", "2"]
    launcher = mpirun(["--host", "localhost:2"]) if side == "ours" else horovodrun
    with (folder / f"{side}.log").open("wb") as log:
        return subprocess.Popen([*launcher, *program], env=variables(), stdout=log, stderr=subprocess.STDOUT)


def one_turn(side: str, job: subprocess.Popen[bytes], folder: Path, number: int) -> float:
    """Let a job take its turn; the seconds of a step."""
    path = folder / f"{side}-{number}"
    path.touch()
    deadline = time.monotonic() + 300
    while not path.with_suffix(".time").exists():
        if job.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{side}: {(folder / f'{side}.log').read_text()[-4000:]}")
        time.sleep(0.02)
    return float(path.with_suffix(".time").read_text())


PARTS: dict[str, Callable[[int, Path], Figures]] = {
    "allreduce": lambda rounds, folder: here("allreduce", rounds, folder),
    "overlap": lambda rounds, folder: here("overlap", rounds, folder),
    "ddp": lambda rounds, folder: here("ddp", rounds, folder),
    "zero": lambda rounds, folder: here("zero", rounds, folder),
    "horovod": horovod,
    "hosts": lambda rounds, folder: across("hosts", rounds, folder),
    "int8": lambda rounds, folder: across("int8", rounds, folder, RATE),
}
TITLES = {
    "allreduce": "All-reduce of float32, two ranks on one machine",
    "overlap": "Overlap: DDP of the 25M MLP on our backend",
    "ddp": "DDP on our backend and on Gloo",
    "zero": "ZeRO 1, 2 and 3 on our backend and on Gloo",
    "horovod": "DDP on our backend and Horovod, the 25M MLP, two jobs by turns",
    "hosts": "All-reduce between two machines (network namespaces), one rank on each",
    "int8": f"All-reduce of {SLOW // MB} MB over a link of 100 Mbit/s, by what travels",
}


def main() -> None:
    """Measure what was asked for and write the report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=", ".join(PARTS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for mpi.json and mpi.md")
    arguments = parser.parse_args()
    import torch

    from distributed_training.native.build import MPI_SOURCE, load_extension
    from distributed_training.runtime.device import machine_facts

    library = load_extension(MPI_SOURCE).library()  # built before anything is measured
    kept = arguments.results / "mpi.json"
    report: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    facts = machine_facts(torch.device("cpu"))
    facts.pop("host")
    report["machine"] = {**facts, "rounds": arguments.rounds, "mpi": library}
    for name in arguments.parts:
        with tempfile.TemporaryDirectory() as folder:
            report[name] = PARTS[name](arguments.rounds, Path(folder))
        print(name, json.dumps(report[name], indent=1), flush=True)
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(json.dumps(report, indent=2) + "\n")
        kept.with_suffix(".md").write_text(markdown(report))


def markdown(report: dict[str, Any]) -> str:
    """The report as tables."""
    machine = report["machine"]
    lines = [
        "# The MPI backend",
        "",
        (
            f"`python benchmarks/mpi.py --rounds {machine['rounds']}`: {machine['cpu_cores']} cores, torch "
            f"{machine['torch']}, {machine['mpi']}, two ranks, one thread each."
        ),
        "Variants take turns in the same ranks; a ratio is the median over rounds, above 1 ours is faster.",
    ]
    for part, title in TITLES.items():
        if part in report:
            lines += ["", f"## {title}", "", *table(report[part])]
    return "\n".join(lines) + "\n"


def table(figures: Figures) -> list[str]:
    """Figures by row, or one row of them."""
    rows = figures if all(isinstance(value, dict) for value in figures.values()) else {"": figures}
    columns = list(next(iter(rows.values())))
    lines = [f"| | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for name, row in rows.items():
        label = f"{int(name) // KB:,} KB" if name.isdigit() else name
        lines.append(f"| {label} | {' | '.join(f'{row[column]:,.3f}' for column in columns)} |")
    return lines


if __name__ == "__main__":
    if sys.argv[1:2] == ["--turns"]:
        take_turns(sys.argv[2], Path(sys.argv[3]))
    elif "--worker" in sys.argv:
        at = sys.argv.index("--worker")
        worker(sys.argv[at + 1], int(sys.argv[at + 2]), Path(sys.argv[at + 3]))
    else:
        main()
