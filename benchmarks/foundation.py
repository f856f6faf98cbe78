"""What the single-device core costs, beside the reference in the same run: `python benchmarks/foundation.py`.

Sections: overhead (our loop against a hand-written one), loader (against torch's DataLoader), allocator, checkpoint.
Give names to run only those. Writes benchmarks/results/foundation.json and .md.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distributed_training import ArrayDataset, Callback, Config, Loader, Plan, Trainer, get_model
from distributed_training.bench.measure import Measured, difference, interleave, ratio
from distributed_training.checkpoint import CheckpointStore
from distributed_training.config import CheckpointConfig, ModelConfig
from distributed_training.runtime.device import machine_facts

RESULTS = Path(__file__).parent / "results"
SCRATCH = Path(tempfile.mkdtemp(prefix="foundation-"))
Batches = list[tuple[torch.Tensor, torch.Tensor]]
Optimizers = Callable[[Any], torch.optim.Optimizer]


class Clock(Callback):
    """Time from the end of one step to the end of another."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last

    def on_step_end(self, trainer: Trainer, step: int, loss: torch.Tensor) -> None:
        if step == self.first:
            self.start = time.perf_counter()
        elif step == self.last:
            self.seconds = time.perf_counter() - self.start


def raw_loop(model: nn.Module, optimizer: Optimizers, batches: Batches, warm: int) -> float:
    """Microseconds a step of the loop that everybody writes."""
    own, criterion = optimizer(model.parameters()), nn.CrossEntropyLoss()
    for number, (inputs, targets) in enumerate(batches):
        own.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward()
        own.step()
        if number == warm:
            start = time.perf_counter()
    return (time.perf_counter() - start) / (len(batches) - 1 - warm) * 1e6


def our_loop(
    model: nn.Module, optimizer: Optimizers, data: Any, size: int, steps: int, warm: int, fused: bool
) -> float:
    """Microseconds a step of Trainer with run directory, ledger, guard, logging and checkpoints at their defaults."""
    clock = Clock(warm, steps - 1)
    settings = {"schedule": "constant", "warmup_epochs": 0, "batch_size": size, "fused": fused}
    config = Config.from_dict({"training": settings, "run": {"progress": "off"}})
    folder = SCRATCH / f"run-{time.time_ns()}"
    Trainer(model, optimizer(model.parameters()), device="cpu", config=config, callbacks=[clock], run_dir=folder).train(
        data, epochs=1
    )
    shutil.rmtree(folder)
    return clock.seconds / (steps - 1 - warm) * 1e6


def overhead(rounds: int) -> dict[str, Any]:
    """Added cost per step on a tiny MLP, and the ratio on a small ResNet."""
    torch.set_num_threads(1)
    size, steps, warm = 64, 600, 100
    inputs, targets = torch.randn(size * steps, 100), torch.randint(0, 10, (size * steps,))
    batches = list(zip(inputs.split(size), targets.split(size)))

    def mlp() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(100, 512), nn.ReLU(), nn.Linear(512, 10))

    found: dict[str, Any] = {}
    kinds: dict[str, Optimizers] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    }
    for name, optimizer in kinds.items():
        data = (inputs, targets)
        measured = interleave(
            {
                "raw": lambda: raw_loop(mlp(), optimizer, batches, warm),  # noqa: B023 (called at once)
                "same batches": lambda: our_loop(mlp(), optimizer, batches, size, steps, warm, False),  # noqa: B023
                "planned": lambda: our_loop(mlp(), optimizer, data, size, steps, warm, False),  # noqa: B023
                "defaults": lambda: our_loop(mlp(), optimizer, data, size, steps, warm, True),  # noqa: B023
            },
            rounds,
        )
        found[f"tiny MLP, {name}"] = {
            "raw loop, us a step": measured["raw"].median,
            "spread": measured["raw"].spread,
            "added by ours, same optimizer and batches, us": difference(measured, "same batches", "raw"),
            "added by ours, shuffled in plan order, us": difference(measured, "planned", "raw"),
            "speed of ours at its defaults, to raw": ratio(measured, "raw", "defaults"),
        }
    found["small ResNet, sgd"] = _small_resnet(rounds)
    return found


def _small_resnet(rounds: int) -> dict[str, Any]:
    torch.set_num_threads(2)
    size, steps = 16, 8
    images, labels = torch.randn(size * steps, 3, 32, 32), torch.randint(0, 10, (size * steps,))
    batches = list(zip(images.split(size), labels.split(size)))

    def resnet() -> nn.Module:
        torch.manual_seed(0)
        return get_model("resnet18")(ModelConfig(num_classes=10), (3, 32, 32))

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)

    measured = interleave(
        {
            "raw": lambda: raw_loop(resnet(), sgd, batches, 1),
            "ours": lambda: our_loop(resnet(), sgd, (images, labels), size, steps, 1, True),
        },
        rounds,
    )
    return {
        "raw loop, us a step": measured["raw"].median,
        "spread": measured["raw"].spread,
        "speed of ours at its defaults, to raw": ratio(measured, "raw", "ours"),
    }


def loader(rounds: int) -> dict[str, Any]:
    """Batches a second of arrays in memory, small batches."""
    torch.set_num_threads(1)
    inputs, targets = torch.randn(64 * 500, 100), torch.randint(0, 10, (64 * 500,))
    ours = Loader(ArrayDataset((inputs, targets)), Plan(len(inputs), 64))
    epochs = iter(range(10**6))

    def rate(batches: Any) -> float:
        start = time.perf_counter()
        count = sum(1 for _ in batches)
        return count / (time.perf_counter() - start)

    plain = TensorDataset(inputs, targets)
    per_sample = [(inputs[i], targets[i]) for i in range(64 * 50)]
    measured = interleave(
        {
            "ours": lambda: rate(batch for _ in range(10) for batch in ours.batches(next(epochs))),
            "tensors": lambda: rate(DataLoader(plain, 64, shuffle=True)),
            "samples": lambda: rate(DataLoader(per_sample, 64, shuffle=True)),  # type: ignore[arg-type]
        },
        rounds,
    )
    return {
        "64x100 floats": {
            "ours, batches a second": measured["ours"].median,
            "spread": measured["ours"].spread,
            "to DataLoader(TensorDataset)": ratio(measured, "ours", "tensors"),
            "to DataLoader(list of samples)": ratio(measured, "ours", "samples"),
        }
    }


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

    measured = interleave(
        {"default": lambda: run("default"), "kept": lambda: run("kept")}, max(3, rounds // 2), warmup=0
    )
    return {
        "25M-parameter MLP": {
            "glibc's defaults, ms a step": measured["default"].median,
            "spread": measured["default"].spread,
            "page faults a step, default": faults["default"],
            "page faults a step, kept": faults["kept"],
            "speed with memory kept, to default": ratio(measured, "default", "kept"),
        }
    }


def checkpoint(rounds: int) -> dict[str, Any]:
    """A 400 MB state to disk: ours until it is durable, and how long the loop stands still."""
    state = {"model": {f"layer{n}": torch.randn(25, 1024, 1024) for n in range(4)}}
    blob = memoryview(torch.cat([t.flatten() for t in state["model"].values()]).numpy()).cast("B")
    folder = SCRATCH / "checkpoints"
    store = CheckpointStore(folder, CheckpointConfig(keep=1, keep_best=False))
    store.prepare(state)
    store.wait()
    steps, raws = iter(range(10**6)), iter(range(10**6))
    stalls: list[float] = []

    def raw() -> float:
        number = next(raws)  # like ours, the file before is deleted only when the new one is whole
        path = SCRATCH / f"raw-{number}.bin"
        start = time.perf_counter()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for at in range(0, len(blob), 8 * 2**20):
            os.write(descriptor, blob[at : at + 8 * 2**20])
        os.fsync(descriptor)
        os.close(descriptor)
        seconds = time.perf_counter() - start
        (SCRATCH / f"raw-{number - 1}.bin").unlink(missing_ok=True)
        return seconds

    def ours() -> float:
        start = time.perf_counter()
        store.save(state, step=next(steps), epoch=0, metrics={})
        stalls.append(time.perf_counter() - start)
        while not store._committed:  # durable and visible; verifying and pruning follow
            time.sleep(0.001)
        seconds = time.perf_counter() - start
        store.wait()
        store.committed()
        return seconds

    def torch_save() -> float:
        path = SCRATCH / "torch.pt"
        start = time.perf_counter()
        with path.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        seconds = time.perf_counter() - start
        path.unlink()
        return seconds

    def copy() -> float:
        start = time.perf_counter()
        for name, tensor in state["model"].items():
            kept[name].copy_(tensor)
        return time.perf_counter() - start

    kept = {name: tensor.clone() for name, tensor in state["model"].items()}
    # The first rounds pay for fresh pages of the page cache, whoever comes first.
    measured = interleave({"raw": raw, "ours": ours, "torch.save": torch_save, "copy": copy}, max(5, rounds), warmup=3)
    return {
        "400 MB": {
            "raw write and sync, s": measured["raw"].median,
            "spread": measured["raw"].spread,
            "ours until durable, to raw": ratio(measured, "ours", "raw"),
            "torch.save, to raw": ratio(measured, "torch.save", "raw"),
            "loop stands still, ms": Measured(stalls[1:]).median * 1e3,
            "one warm copy, ms": measured["copy"].median * 1e3,
        }
    }


def main() -> None:
    """Run the sections asked for and write the report."""
    logging.disable(logging.WARNING)
    sections = {"overhead": overhead, "loader": loader, "allocator": allocator, "checkpoint": checkpoint}
    chosen = [name for name in sys.argv[1:] if name in sections] or list(sections)
    rounds = int(os.environ.get("ROUNDS", "9"))
    report: dict[str, Any] = {"machine": {**machine_facts(torch.device("cpu")), "rounds": rounds}}
    report["machine"].pop("host")
    try:
        for name in chosen:
            report[name] = sections[name](rounds)
            print(json.dumps({name: report[name]}, indent=2), flush=True)
    finally:
        shutil.rmtree(SCRATCH, ignore_errors=True)
    if len(chosen) == len(sections):
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "foundation.json").write_text(json.dumps(report, indent=2) + "\n")
        (RESULTS / "foundation.md").write_text(markdown(report))
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB")


def markdown(report: dict[str, Any]) -> str:
    """The report as tables."""
    machine = report["machine"]
    command = f"ROUNDS={machine['rounds']} python benchmarks/foundation.py"
    where = (
        f"`{command}`: {machine['cpu_cores']} cores, torch {machine['torch']}. One run of several: see ../README.md."
    )
    lines = [
        "# Single-device core",
        "",
        where,
        "Variants take turns in one run. Figures are medians; ratios and differences are taken round by round.",
        "Spread is the distance of the quartiles as a share of the median.",
    ]
    for section in (key for key in report if key != "machine"):
        lines += ["", f"## {section.capitalize()}", "", "| what | figure | value |", "|---|---|---|"]
        for what, figures in report[section].items():
            lines += [f"| {what} | {name} | {value:,.3f} |" for name, value in figures.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
