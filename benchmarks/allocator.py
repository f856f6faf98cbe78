"""What keeping freed memory in the process brings to training on the CPU: `python benchmarks/allocator.py`.

Each turn is a new interpreter: the setting cannot be taken back. Writes benchmarks/results/allocator.json and .md.
Overhead of the loop, loading and checkpoints are measured by `dtrain bench`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from distributed_training.bench.measure import interleave, ratio
from distributed_training.runtime.device import machine_facts

RESULTS = Path(__file__).parent / "results"

_ALLOCATOR = """
import resource, sys, time, torch
from torch import nn
from distributed_training.runtime.allocator import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
torch.manual_seed(0)
sizes = [1024, 3072, 3072, 3072, 1000]
layers = [m for a, b in zip(sizes, sizes[1:]) for m in (nn.Linear(a, b), nn.ReLU())][:-1]
model = nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
x, y = torch.randn(64, 1024), torch.randint(0, 1000, (64,))
for step in range(25):
    if step == 10:
        start, faults = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
print((time.perf_counter() - start) / 15, (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) / 15)
"""


def allocator(rounds: int) -> dict[str, Any]:
    """A 25M-parameter MLP on the CPU with and without keeping freed memory in the process."""
    faults: dict[str, float] = {}

    def run(kind: str) -> float:
        done = subprocess.run([sys.executable, "-c", _ALLOCATOR, kind], capture_output=True, text=True, check=True)
        seconds, faults[kind] = map(float, done.stdout.split())
        return seconds * 1e3

    measured = interleave({"default": lambda: run("default"), "kept": lambda: run("kept")}, rounds, warmup=0)
    return {
        "25M-parameter MLP": {
            "glibc's defaults, ms a step": measured["default"].median,
            "spread": measured["default"].spread,
            "page faults a step, default": faults["default"],
            "page faults a step, kept": faults["kept"],
            "speed with memory kept, to default": ratio(measured, "default", "kept"),
        }
    }


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    machine = machine_facts(torch.device("cpu"))
    machine.pop("host")
    found = allocator(rounds)
    RESULTS.mkdir(exist_ok=True)
    report = {"machine": {**machine, "rounds": rounds}, "allocator": found}
    (RESULTS / "allocator.json").write_text(json.dumps(report, indent=2) + "\n")
    lines = ["# Memory kept in the process", "", f"`python benchmarks/allocator.py --rounds {rounds}`: ", ""]
    lines[2] += f"{machine['cpu_cores']} cores, torch {machine['torch']}."
    lines += ["| what | figure | value |", "|---|---|---|"]
    lines += [f"| {what} | {name} | {value:,.3f} |" for what, row in found.items() for name, value in row.items()]
    (RESULTS / "allocator.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
