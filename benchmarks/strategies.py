"""Our strategies beside the same library used by hand, in one run.

    python benchmarks/strategies.py [ddp] [zero3] [deepspeed] [accelerate] [horovod] [--launches 3] [--rounds 7]

Two jobs are there at a time, the loop of the library's documentation and ours, each in processes of its own as a user
would start them, and take turns on the same batches; the one whose turn it is not sleeps. The time of a turn is that of
rank 0, and every turn begins with a barrier. Where a process happens to lie in memory moves its speed by a few per
cent, so both jobs are started anew several times. Writes benchmarks/results/strategies.json and .md.

Ours keeps freed memory in the process, which a loop by hand does not. `--keep-freed-memory` gives it that too, to see
what else we add; that run writes strategies_same_memory.json and .md.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
Step = Callable[[Any, Any], None]
Barrier = Callable[[], Any]


def mlp() -> Any:
    """25 million parameters."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    sizes = [1024, 3072, 3072, 3072, 1000]
    layers = [m for a, b in itertools.pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())][:-1]
    return nn.Sequential(*layers)


def resnet() -> Any:
    """ResNet-18 for images of 32 pixels."""
    import torch

    from distributed_training import get_model
    from distributed_training.config import ModelConfig

    torch.manual_seed(0)
    return get_model("resnet18")(ModelConfig(num_classes=10), (3, 32, 32))


MODELS: dict[str, tuple[Callable[[], Any], tuple[int, ...], int, int]] = {
    # name: model, shape of a sample, classes, samples of a rank's step
    "25M MLP": (mlp, (1024,), 1000, 16),
    "small ResNet": (resnet, (3, 32, 32), 10, 8),
}
STEPS, WARM = 8, 2


def timed(step: Callable[[Any, Any], None], batches: Any, barrier: Callable[[], None]) -> float:
    """Seconds a step, after a warm-up."""
    barrier()
    for number, (x, y) in enumerate(batches):
        if number == WARM:
            start = time.perf_counter()
        step(x, y)
    return (time.perf_counter() - start) / (len(batches) - WARM)


def optimizer_of(model: Any, fused: bool) -> Any:
    """The same for both sides: by hand it is told to be fused, ours is by default. What is compared is the strategy."""
    import torch

    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused or None)


def by_hand_ddp(model: Any) -> tuple[Step, Barrier]:
    """The loop of the DDP tutorial."""
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = optimizer_of(model, True)

    def step(x: Any, y: Any) -> None:
        optimizer.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        optimizer.step()

    return step, dist.barrier


def by_hand_fsdp(model: Any) -> tuple[Step, Barrier]:
    """fully_shard over every layer or block, then the model."""
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    blocks = [m for m in model.modules() if type(m).__name__.endswith("Block")]
    for part in blocks or [m for m in model.children() if any(True for _ in m.parameters())]:
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = optimizer_of(model, True)

    def step(x: Any, y: Any) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step, dist.barrier


def by_hand_deepspeed(model: Any) -> tuple[Step, Barrier]:
    """deepspeed.initialize, engine.backward, engine.step."""
    import deepspeed
    import torch.distributed as dist
    import torch.nn.functional as F

    deepspeed.init_distributed("gloo")
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 2},  # what ours is unless told otherwise
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(model, True), config=settings)

    def step(x: Any, y: Any) -> None:
        engine.backward(F.cross_entropy(engine(x), y))
        engine.step()

    return step, dist.barrier


def by_hand_accelerate(model: Any) -> tuple[Step, Barrier]:
    """accelerator.prepare, accelerator.backward."""
    import torch.nn.functional as F
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    wrapped, optimizer = accelerator.prepare(model, optimizer_of(model, True))

    def step(x: Any, y: Any) -> None:
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(wrapped(x), y))
        optimizer.step()

    return step, accelerator.wait_for_everyone


def by_hand_horovod(model: Any) -> tuple[Step, Barrier]:
    """DistributedOptimizer with broadcasts, as in its documentation."""
    import horovod.torch as hvd
    import torch.nn.functional as F

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer_of(model, True), named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def step(x: Any, y: Any) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step, lambda: hvd.barrier()


BY_HAND = {
    "ddp": by_hand_ddp,
    "zero3": by_hand_fsdp,
    "deepspeed": by_hand_deepspeed,
    "accelerate": by_hand_accelerate,
    "horovod": by_hand_horovod,
}
LAUNCHERS = {"horovod": "horovodrun"}


def ours(name: str, model: Any, size: int) -> tuple[Step, Barrier]:
    """Our step as the loop runs it: process settings and the guard against non-finite gradients included."""
    import numpy as np
    import torch

    from distributed_training import Config
    from distributed_training.config import StrategyConfig
    from distributed_training.data.base import Batch
    from distributed_training.runtime.allocator import keep_freed_memory
    from distributed_training.runtime.world import read_world
    from distributed_training.strategies import Place, make_strategy
    from distributed_training.training.engine import Engine
    from distributed_training.training.step import TrainStep

    keep_freed_memory()
    world = read_world()
    strategy = make_strategy(Place(torch.device("cpu"), world, StrategyConfig(name=name), 1800.0, size * world.size))
    engine = Engine(model, optimizer_of(model, False), strategy, None, Config.from_dict({}))
    train, number = TrainStep(engine, 1, 0), itertools.count()

    def step(x: Any, y: Any) -> None:
        train(Batch(np.arange(len(x)), (x, y), np.arange(len(x) * world.size)), 0, next(number))

    return step, strategy.barrier


def worker(side: str, name: str, model_name: str, folder: Path) -> None:
    """One rank of one side: takes its turn whenever the file of that turn appears, and rank 0 answers with the time."""
    import torch

    logging.disable(logging.WARNING)
    make, shape, classes, size = MODELS[model_name]
    if os.environ.get("KEEP_FREED_MEMORY"):
        from distributed_training.runtime.allocator import keep_freed_memory

        keep_freed_memory()
    step, barrier = ours(name, make(), size) if side == "ours" else BY_HAND[name](make())
    rank = int(os.environ.get("RANK") or os.environ["HOROVOD_RANK"])
    generator = torch.Generator().manual_seed(rank)
    batches = [
        (torch.randn(size, *shape, generator=generator), torch.randint(0, classes, (size,), generator=generator))
        for _ in range(STEPS)
    ]
    take_turns(side, rank, folder, lambda: timed(step, batches, barrier))


def take_turns(side: str, rank: int, folder: Path, measure: Callable[[], float]) -> None:
    """Measure whenever the file of this side's next turn appears; rank 0 writes the seconds. Ends the process."""
    for number in itertools.count():
        turn = folder / f"{side}-{number}"
        while not turn.exists():
            if (folder / "end").exists():
                os._exit(0)  # nothing is measured in taking the library down
            time.sleep(0.02)
        seconds = measure()
        if rank == 0:
            (folder / "part").write_text(str(seconds))
            (folder / "part").rename(turn.with_suffix(".time"))


def start(side: str, name: str, model_name: str, ranks: int, folder: Path) -> subprocess.Popen[bytes]:
    """Start one side under the launcher of the strategy."""
    program = [sys.executable, __file__, "--worker", side, name, model_name, str(folder)]
    if LAUNCHERS.get(name) == "horovodrun":
        command = [str(Path(sys.executable).with_name("horovodrun")), "-np", str(ranks), *program]
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        command += program[1:]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PATH": path}
    with (folder / f"{side}.log").open("wb") as log:
        return subprocess.Popen(command, env=own, stdout=log, stderr=subprocess.STDOUT)


def turns(name: str, model_name: str, ranks: int, rounds: int) -> dict[str, Any]:
    """Start both sides and let them take turns."""
    from distributed_training.bench.measure import interleave

    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        jobs = {side: start(side, name, model_name, ranks, folder) for side in ("hand", "ours")}
        count = {side: itertools.count() for side in jobs}

        def turn(side: str) -> float:
            path = folder / f"{side}-{next(count[side])}"
            path.touch()
            deadline = time.monotonic() + 300
            while not path.with_suffix(".time").exists():
                if jobs[side].poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{name}, {model_name}, {side}: {(folder / f'{side}.log').read_text()[-4000:]}")
                time.sleep(0.02)
            return float(path.with_suffix(".time").read_text())

        try:
            return interleave({side: lambda side=side: turn(side) for side in jobs}, rounds)
        finally:
            (folder / "end").touch()
            for job in jobs.values():
                try:
                    job.wait(30)
                except subprocess.TimeoutExpired:
                    job.kill()


def compare(name: str, model_name: str, ranks: int, launches: int, rounds: int) -> dict[str, float]:
    """The figures of a strategy and a model over all launches."""
    from distributed_training.bench.measure import Measured, ratio

    parts = [turns(name, model_name, ranks, rounds) for _ in range(launches)]
    measured = {side: Measured([v for part in parts for v in part[side].values]) for side in parts[0]}
    each = [ratio(part, "hand", "ours") for part in parts]
    return {
        "by hand, ms a step": measured["hand"].median * 1e3,
        "spread": measured["hand"].spread,
        "speed of ours, to by hand": ratio(measured, "hand", "ours"),
        "lowest launch": min(each),
        "highest launch": max(each),
    }


def main() -> None:
    """Measure what was asked for and write the report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("strategies", nargs="*", default=list(BY_HAND))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=7, help="turns of each side a launch")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--keep-freed-memory", action="store_true", help="in the loop by hand too")
    arguments = parser.parse_args()
    if arguments.keep_freed_memory:
        os.environ["KEEP_FREED_MEMORY"] = "1"
    import torch

    from distributed_training.runtime.device import machine_facts

    facts = machine_facts(torch.device("cpu"))
    facts.pop("host")
    report: dict[str, Any] = {
        "machine": {
            **facts,
            **{key: getattr(arguments, key) for key in ("ranks", "launches", "rounds", "keep_freed_memory")},
        }
    }
    for name in arguments.strategies:
        for model_name in arguments.models:
            figures = compare(name, model_name, arguments.ranks, arguments.launches, arguments.rounds)
            report.setdefault(name, {})[model_name] = figures
            print(name, model_name, json.dumps(figures), flush=True)
            write(report, "strategies_same_memory" if arguments.keep_freed_memory else "strategies")


def write(report: dict[str, Any], name: str) -> None:
    """Keep what is measured so far."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(report, indent=2) + "\n")
    (RESULTS / f"{name}.md").write_text(markdown(report))


def markdown(report: dict[str, Any]) -> str:
    """The report as a table."""
    machine = report["machine"]
    lines = [
        "# Strategies beside the same library used by hand",
        "",
        (
            f"`python benchmarks/strategies.py --ranks {machine['ranks']} --launches {machine['launches']} "
            f"--rounds {machine['rounds']}{' --keep-freed-memory' if machine['keep_freed_memory'] else ''}`: "
            f"{machine['cpu_cores']} cores, torch {machine['torch']}, one thread a rank."
        ),
        (
            "By hand and ours are jobs of their own that take turns. The ratio is the median over all rounds; above 1 "
            "ours is faster. Beside it the lowest and highest of the launches."
        ),
        "",
        "| strategy | model | by hand, ms a step | spread | speed of ours, to by hand | lowest | highest |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in (key for key in report if key != "machine"):
        for model, figures in report[name].items():
            values = " | ".join(f"{value:,.3f}" for value in figures.values())
            lines.append(f"| {name} | {model} | {values} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if "--worker" in sys.argv:
        at = sys.argv.index("--worker")
        worker(sys.argv[at + 1], sys.argv[at + 2], sys.argv[at + 3], Path(sys.argv[at + 4]))
    else:
        main()
