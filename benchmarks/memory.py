"""Peak memory per rank of a ~100M-parameter GPT with AdamW: `python benchmarks/memory.py --ranks 2`.

Each strategy trains a few steps in a fresh job. Measured is resident memory beyond what the process had before there
was a model. glibc is told to give freed memory back at once, so that what is resident is what is in use. Writes
benchmarks/results/memory.json and .md. Names of strategies after the options: only those, and nothing is written.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from distributed_training.config import StrategyConfig
from distributed_training.models.gpt import GPT, GPTArguments
from distributed_training.runtime.device import machine_facts
from distributed_training.runtime.meters import ResidentMemory
from distributed_training.runtime.world import World, read_world
from distributed_training.strategies import Place, StepSettings, make_strategy, needs

RESULTS = Path(__file__).parent / "results"
GPT_100M = GPTArguments(vocab_size=16384, context=64, layers=12, heads=12, width=768)
SEQUENCES, STEPS = 2, 3
# name in the table: settings, and bytes for each parameter on each of n ranks: weights, gradients, AdamW's two averages
VARIANTS: dict[str, tuple[dict[str, Any], Callable[[int], float]]] = {
    "single": ({"name": "single"}, lambda n: 16),
    "ddp": ({"name": "ddp"}, lambda n: 16),
    "zero1": ({"name": "zero1"}, lambda n: 8 + 8 / n),
    "zero2": ({"name": "zero2"}, lambda n: 4 + 16 / n),
    "zero3": ({"name": "zero3"}, lambda n: 16 / n),
    "fsdp": ({"name": "fsdp"}, lambda n: 16 / n),
    "deepspeed, stage 1": ({"name": "deepspeed", "zero_stage": 1}, lambda n: 8 + 8 / n),
    "deepspeed, stage 2": ({"name": "deepspeed", "zero_stage": 2}, lambda n: 4 + 12 / n),
    "deepspeed, stage 3": ({"name": "deepspeed", "zero_stage": 3}, lambda n: 16 / n),
    # What `training.type=accelerated strategy.zero_stage=N` is.
    **{
        f"accelerate, stage {stage}": ({"name": "accelerate", "plugin": "deepspeed", "zero_stage": stage}, formula)
        for stage, formula in (
            (1, lambda n: 8 + 8 / n),
            (2, lambda n: 4 + 12 / n),
            (3, lambda n: 16 / n),
        )
    },
}


def measure(variant: str, folder: Path) -> None:
    """In one rank: train, and write what it took."""
    torch.set_num_threads(1)
    config = StrategyConfig(**VARIANTS[variant][0])
    world = read_world() if config.name != "single" else World()
    strategy = make_strategy(Place(torch.device("cpu"), world, config, batch_size=SEQUENCES * world.size))
    torch.manual_seed(0)
    tokens = torch.randint(GPT_100M.vocab_size, (STEPS, SEQUENCES, GPT_100M.context))
    memory = ResidentMemory()
    memory.peak()  # forgets what was before
    model = GPT(GPT_100M)
    parameters = sum(p.numel() for p in model.parameters())
    forward = strategy.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-4), StepSettings())
    begin = memory.peak()
    for step, ids in enumerate(tokens):
        if step == STEPS - 1:  # the first ones make the optimizer's state
            memory.peak()
        loss = forward(ids, labels=ids)["loss"] / strategy.world_size
        strategy.backward(loss)
        strategy.step(loss.detach())
        if step == 0:
            begin = max(begin, memory.peak())
    found = {"parameters": parameters, "begin": begin / 1e6, "step": memory.peak() / 1e6}
    (folder / f"{world.rank}.json").write_text(json.dumps(found))
    strategy.teardown()


def run(variant: str, ranks: int) -> dict[str, Any] | None:
    """The worst rank of a fresh job; None where the strategy's library is missing."""
    name = VARIANTS[variant][0]["name"]
    if not needs(name).installed:
        return None
    own = ["--measure", variant, "--ranks", str(ranks)]
    program = [sys.executable] if name == "single" else [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    program += [] if name == "single" else [f"--nproc_per_node={ranks}"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "0",
    }
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [*program, __file__, *own, "--folder", folder],
            check=True,
            timeout=900,
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        found = [json.loads(file.read_text()) for file in Path(folder).glob("*.json")]
    figures = {key: max(rank[key] for rank in found) for key in ("parameters", "begin", "step")}
    size = figures["parameters"] * VARIANTS[variant][1](1 if name == "single" else ranks) / 1e6
    return {**figures, "formula": size, "ranks": len(found)}


def markdown(report: dict[str, Any]) -> str:
    """The report as a table."""
    machine, rows = report["machine"], report["strategies"]
    parameters = next(iter(rows.values()))["parameters"] / 1e6
    where = (
        f"`python benchmarks/memory.py --ranks {report['ranks']}`: a GPT of {parameters:.1f}M parameters in fp32, "
        f"AdamW, {SEQUENCES} sequences of {GPT_100M.context} tokens a rank, CPU, torch {machine['torch']}."
    )
    meaning = (
        "MB of the rank that needs most. A step: the peak of a step once all state is there. Start: the peak until the "
        "end of the first step, the whole model before it is divided included. Formula: weights, gradients and "
        "optimizer state, without activations and buffers."
    )
    lines = [
        "# Memory per rank",
        "",
        where,
        "",
        meaning,
        "",
        "| strategy | ranks | a step | start | formula | a step, to ddp |",
        "|---|---|---|---|---|---|",
    ]
    ddp = rows.get("ddp", next(iter(rows.values())))["step"]
    for name, row in rows.items():
        lines.append(
            f"| {name} | {row['ranks']} | {row['step']:,.0f} | {row['begin']:,.0f} | {row['formula']:,.0f} | "
            f"{row['step'] / ddp:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure the strategies asked for and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("strategies", nargs="*", metavar="strategy", help=f"of {', '.join(VARIANTS)}; all if left out")
    options = parser.parse_args()
    if options.measure:
        measure(options.measure, options.folder)
        return
    machine = {key: value for key, value in machine_facts(torch.device("cpu")).items() if key != "host"}
    report: dict[str, Any] = {"machine": machine, "ranks": options.ranks, "strategies": {}}
    for variant in options.strategies or VARIANTS:
        found = run(variant, options.ranks)
        if found is not None:
            report["strategies"][variant] = found
            print(variant, json.dumps(found), flush=True)
    print(markdown(report))
    if not options.strategies:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "memory.json").write_text(json.dumps(report, indent=2) + "\n")
        (RESULTS / "memory.md").write_text(markdown(report))


if __name__ == "__main__":
    main()
