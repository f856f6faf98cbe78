"""Our strategies beside the same library used by hand, in the same ranks and the same run.

    python benchmarks/strategies.py [ddp] [fsdp] [deepspeed] [accelerate] [horovod] [--ranks 2] [--rounds 21]

Every rank runs both loops by turns on the same batches; the time of a turn is that of rank 0, and every turn begins
with a barrier. Writes benchmarks/results/strategies.json and .md.
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
Turn = Callable[[], float]


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


def by_hand_ddp(model: Any, config: Any) -> tuple[Callable[[Any, Any], None], Callable[[], None]]:
    """The loop of the DDP tutorial."""
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = optimizer_of(model, True)

    def step(x: Any, y: Any) -> None:
        optimizer.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        optimizer.step()

    return step, dist.barrier


def by_hand_fsdp(model: Any, config: Any) -> tuple[Callable[[Any, Any], None], Callable[[], None]]:
    """fully_shard over every layer with parameters, then the model."""
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for child in model.children():
        if any(True for _ in child.parameters()):
            fully_shard(child, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = optimizer_of(model, True)

    def step(x: Any, y: Any) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step, dist.barrier


def by_hand_deepspeed(model: Any, config: Any) -> tuple[Callable[[Any, Any], None], Callable[[], None]]:
    """deepspeed.initialize, engine.backward, engine.step."""
    import deepspeed
    import torch.distributed as dist
    import torch.nn.functional as F

    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": config.zero_stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(model, True), config=settings)

    def step(x: Any, y: Any) -> None:
        engine.backward(F.cross_entropy(engine(x), y))
        engine.step()

    return step, dist.barrier


def by_hand_accelerate(model: Any, config: Any) -> tuple[Callable[[Any, Any], None], Callable[[], None]]:
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


def by_hand_horovod(model: Any, config: Any) -> tuple[Callable[[Any, Any], None], Callable[[], None]]:
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


def ours(model: Any, strategy: Any) -> Callable[[Any, Any], None]:
    """Our step as the loop runs it, its guard against non-finite gradients included."""
    from distributed_training import Config
    from distributed_training.data.base import Batch
    from distributed_training.training.engine import Engine
    from distributed_training.training.step import TrainStep

    engine = Engine(model, optimizer_of(model, False), strategy, None, Config.from_dict({}))
    train, ranks, number = TrainStep(engine, 1, 0), strategy.world_size, iter(range(10**9))

    def step(x: Any, y: Any) -> None:
        import numpy as np

        ids = np.arange(len(x))
        train(Batch(ids, (x, y), np.arange(len(x) * ranks)), 0, next(number))

    return step


def worker(name: str, model_name: str, rounds: int, out: Path) -> None:
    """One rank: measure by turns. A turn of ours and one by hand never overlap."""
    import torch

    from distributed_training.bench.measure import interleave, ratio
    from distributed_training.config import StrategyConfig
    from distributed_training.runtime.allocator import keep_freed_memory
    from distributed_training.runtime.world import read_world
    from distributed_training.strategies import Place, make_strategy

    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    keep_freed_memory()
    make, shape, classes, size = MODELS[model_name]
    config = StrategyConfig(name=name)
    world = read_world()
    strategy = make_strategy(Place(torch.device("cpu"), world, config, 300.0, size * world.size))
    generator = torch.Generator().manual_seed(strategy.rank)
    batches = [
        (torch.randn(size, *shape, generator=generator), torch.randint(0, classes, (size,), generator=generator))
        for _ in range(STEPS)
    ]
    our_step = ours(make(), strategy)
    hand_step, barrier = BY_HAND[name](make(), config)
    measured = interleave(
        {"hand": lambda: timed(hand_step, batches, barrier), "ours": lambda: timed(our_step, batches, barrier)}, rounds
    )
    if strategy.rank == 0:
        out.write_text(
            json.dumps(
                {
                    "by hand, ms a step": measured["hand"].median * 1e3,
                    "spread": measured["hand"].spread,
                    "speed of ours, to by hand": ratio(measured, "hand", "ours"),
                }
            )
        )
    barrier()
    os._exit(0)  # two owners of one process group: neither need be taken down


def launch(name: str, model_name: str, ranks: int, rounds: int, folder: Path) -> dict[str, float]:
    """Run the workers under the launcher of the strategy."""
    out = folder / f"{name}-{model_name.replace(' ', '-')}.json"
    program = [sys.executable, __file__, "--worker", name, model_name, str(rounds), str(out)]
    if LAUNCHERS.get(name) == "horovodrun":
        command = [str(Path(sys.executable).with_name("horovodrun")), "-np", str(ranks), *program]
    else:
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--master_port=29633"]
        command += program[1:]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PATH": path}
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=1800)
    if not out.exists():
        raise RuntimeError(f"{name}, {model_name}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
    return dict(json.loads(out.read_text()))


def main() -> None:
    """Measure what was asked for and write the report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("strategies", nargs="*", default=list(BY_HAND))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=21)
    arguments = parser.parse_args()
    import torch

    from distributed_training.runtime.device import machine_facts

    facts = machine_facts(torch.device("cpu"))
    facts.pop("host")
    report: dict[str, Any] = {"machine": {**facts, "rounds": arguments.rounds, "ranks": arguments.ranks}}
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.strategies:
            for model_name in MODELS:
                figures = launch(name, model_name, arguments.ranks, arguments.rounds, Path(folder))
                report.setdefault(name, {})[model_name] = figures
                print(name, model_name, json.dumps(figures), flush=True)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "strategies.json").write_text(json.dumps(report, indent=2) + "\n")
    (RESULTS / "strategies.md").write_text(markdown(report))


def markdown(report: dict[str, Any]) -> str:
    """The report as a table."""
    machine = report["machine"]
    lines = [
        "# Strategies beside the same library used by hand",
        "",
        (
            f"`python benchmarks/strategies.py --ranks {machine['ranks']} --rounds {machine['rounds']}`: "
            f"{machine['cpu_cores']} cores, torch {machine['torch']}, one thread a rank."
        ),
        "Both loops take turns in the same ranks. The ratio is the median over rounds; above 1 ours is faster.",
        "",
        "| strategy | model | by hand, ms a step | spread | speed of ours, to by hand |",
        "|---|---|---|---|---|",
    ]
    for name in (key for key in report if key != "machine"):
        for model, figures in report[name].items():
            values = " | ".join(f"{value:,.3f}" for value in figures.values())
            lines.append(f"| {name} | {model} | {values} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if "--worker" in sys.argv:
        at = sys.argv.index("--worker")
        worker(sys.argv[at + 1], sys.argv[at + 2], int(sys.argv[at + 3]), Path(sys.argv[at + 4]))
    else:
        main()
