"""What the GPU does in ten steps of our Trainer at its defaults: kernels, and the time that it stands idle.

`python benchmarks/profile_steps.py resnet50-128` (any case of `dtrain bench overhead`). CUDA only. Kernels of one
replay of a recorded step belong together, so that idle time between steps is told from gaps between kernels of a step.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from distributed_training.bench.jobs import JOBS
from distributed_training.config import Config
from distributed_training.training import Callback, Trainer

STEPS = 10
_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


class Profiled(Callback):
    """Profiles ten steps once the training has found its way to run them; the first of them is not counted."""

    def __init__(self, after: int) -> None:
        self._at, self._after = 0, after
        self.events: list[dict[str, Any]] = []

    def on_step_end(self, trainer: Trainer, step: int, loss: Tensor) -> None:
        self._at += 1
        if self._at == self._after:
            torch.cuda.synchronize()
            self._profile = profile(activities=[ProfilerActivity.CUDA])
            self._profile.__enter__()
        elif self._at == self._after + STEPS + 1:
            torch.cuda.synchronize()
            self._profile.__exit__(None, None, None)
            with tempfile.NamedTemporaryFile(suffix=".json") as file:
                self._profile.export_chrome_trace(file.name)
                self.events = json.loads(Path(file.name).read_text())["traceEvents"]
            trainer.stop("profiled")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("case", choices=sorted(JOBS))
    parser.add_argument("--after", type=int, default=60, help="steps before the profile")
    parser.add_argument("--batch-size", type=int, default=None)
    parser.add_argument("--output", type=Path, default=None, help="a JSON file for the figures")
    options = parser.parse_args()
    job = JOBS[options.case]
    size = options.batch_size or job.batch_size
    training = {"schedule": "constant", "warmup_epochs": 0, "epochs": 10**6, "batch_size": size}
    config = Config.from_dict({"training": training, "checkpoint": {"every_epochs": 0}, "run": {"progress": "off"}})
    inputs, targets = job.arrays(max(16, size and 4096 // size))
    data: Any = {"input_ids": inputs, "labels": targets} if job.kind == "tokens" else (inputs, targets)
    model = job.build().to("cuda")
    watch = Profiled(options.after)
    Trainer(model, job.optimizer(model), device="cuda", config=config, callbacks=[watch], run_dir=False).train(data)
    found = figures(watch.events)
    if options.output is not None:
        options.output.write_text(json.dumps(found, indent=1) + "\n")
    show(options.case, size, found)


def figures(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Microseconds a step: busy, idle within a step and between steps; and the kernels by name."""
    launched = [e for e in events if e.get("cat") in _GPU]
    replays = {e["args"].get("correlation") for e in events if "GraphLaunch" in e.get("name", "")}
    steps: dict[Any, list[dict[str, Any]]] = collections.defaultdict(list)
    for event in launched:
        if event["args"].get("correlation") in replays:
            steps[event["args"]["correlation"]].append(event)
    spans = sorted((min(e["ts"] for e in s), max(e["ts"] + e["dur"] for e in s)) for s in steps.values())[1:]
    if not spans:
        return {"replays": 0}
    begin, end = spans[0][0], spans[-1][1]
    within = sorted((e for e in launched if begin <= e["ts"] < end), key=lambda e: e["ts"])
    idle_between = idle_within = 0.0
    at = begin
    for event in within:
        gap = event["ts"] - at
        if gap > 0:
            inside = any(a < at and event["ts"] < b for a, b in spans)
            idle_within, idle_between = idle_within + gap * inside, idle_between + gap * (not inside)
        at = max(at, event["ts"] + event["dur"])
    count = len(spans)
    kernels: collections.Counter[str] = collections.Counter()
    for event in within:
        kernels[_short(event["name"])] += event["dur"]
    return {
        "replays": count,
        "step": (end - begin) / count,
        "median_of_replays": statistics.median(b - a for a, b in spans),
        "kernels_a_step": len(within) / count,
        "idle_within": idle_within / count,
        "idle_between": idle_between / count,
        "outside_of_replays": sum(e["dur"] for e in within if e["args"].get("correlation") not in replays) / count,
        "kernels": {name: total / count for name, total in kernels.most_common(12)},
    }


def _short(name: str) -> str:
    for word in ("void ", "at::native::", "(anonymous namespace)::"):
        name = name.replace(word, "")
    return name.split("<")[0].split("(")[0][:60]


def show(case: str, size: int, found: dict[str, Any]) -> None:
    """The figures as Markdown."""
    print(f"{case}, batch {size}, {torch.cuda.get_device_name()}: {found['replays']} steps")
    if not found["replays"]:
        print("no step was replayed: see the log for the reason")
        return
    print("\n| us a step | |\n|---|---|")
    print(f"| from begin to begin, under the profiler | {found['step']:.1f} |")
    print(f"| idle between steps | {found['idle_between']:.1f} |")
    print(f"| idle between the {found['kernels_a_step']:.0f} kernels of a step | {found['idle_within']:.1f} |")
    print(f"| kernels outside of the recorded step | {found['outside_of_replays']:.1f} |")
    for name, spent in found["kernels"].items():
        print(f"| `{name}` | {spent:.1f} |")


if __name__ == "__main__":
    main()
    os._exit(0)  # workers of the compiler may linger
