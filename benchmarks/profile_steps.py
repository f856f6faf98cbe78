"""What the GPU does in ten steps of our Trainer at its defaults: kernels, and the time that it stands idle.

`python benchmarks/profile_steps.py resnet50-128` (any case of `dtrain bench overhead`). CUDA only. Time between steps
is taken without the profiler, which makes the start of a recorded step many times longer: by CUDA events around each
replay. Kernels are those that the profiler saw in ten more steps.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import logging
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from distributed_training.bench.fed_training import made_up as image_bytes
from distributed_training.bench.jobs import JOBS, Job
from distributed_training.config import Config
from distributed_training.config.load import parse_override
from distributed_training.training import Callback, Trainer

STEPS, STAMPED = 10, 50
_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


class Stamped(torch.cuda.CUDAGraph):
    """A graph whose replays are stamped on the GPU, when they begin and when they end."""

    stamps: ClassVar[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = []
    wanted: ClassVar[bool] = False

    def replay(self) -> None:
        """Replay it, between two events."""
        if not self.wanted:
            return super().replay()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        super().replay()
        end.record()
        self.stamps.append((begin, end))
        return None


class Profiled(Callback):
    """Stamps the steps after so many, then profiles ten; the first of them is not counted."""

    def __init__(self, after: int) -> None:
        self._at, self._after = 0, after
        self.events: list[dict[str, Any]] = []

    def on_step_end(self, trainer: Trainer, step: int, loss: Tensor) -> None:
        self._at += 1
        if self._at == self._after - STAMPED:
            Stamped.wanted = True
        elif self._at == self._after:
            Stamped.wanted = False
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
    parser.add_argument("--settings", nargs="*", default=[], help="of the config, such as training.precision=bf16")
    parser.add_argument("--output", type=Path, default=None, help="a JSON file for the figures")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    job = JOBS[options.case]
    size = options.batch_size or job.batch_size
    training = {"schedule": "constant", "warmup_epochs": 0, "epochs": 10**6, "batch_size": size}
    settings: dict[str, Any] = {"training": training, "checkpoint": {"every_epochs": 0}, "run": {"progress": "off"}}
    for setting in options.settings:
        for section, values in parse_override(setting).items():
            settings.setdefault(section, {}).update(values)
    config = Config.from_dict(settings)
    torch.cuda.CUDAGraph = Stamped  # type: ignore[misc]
    model = job.build().to("cuda")
    watch = Profiled(options.after)
    trainer = Trainer(model, job.optimizer(model), device="cuda", config=config, callbacks=[watch], run_dir=False)
    trainer.train(arrays(job, max(16, 4096 // size)))
    found = figures(watch.events) | between(Stamped.stamps[10:])
    if options.output is not None:
        options.output.write_text(json.dumps(found, indent=1) + "\n")
    show(options.case, size, found)


def arrays(job: Job, steps: int) -> Any:
    """Data for so many steps: tokens, or samples with labels; large images as bytes, as they are stored."""
    if job.kind == "images" and job.shape[-1] > 32:
        return image_bytes(job)
    inputs, targets = job.arrays(steps)
    return {"input_ids": inputs, "labels": targets} if job.kind == "tokens" else (inputs, targets)


def figures(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Microseconds a step, as the profiler saw it: idle within a step, and the kernels by name."""
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
    idle = 0.0
    at = begin
    for event in within:
        gap = event["ts"] - at
        if gap > 0 and any(a < at and event["ts"] < b for a, b in spans):
            idle += gap
        at = max(at, event["ts"] + event["dur"])
    count = len(spans)
    kernels: collections.Counter[str] = collections.Counter()
    for event in within:
        kernels[_short(event["name"])] += event["dur"]
    return {
        "replays": count,
        "replay": statistics.median(b - a for a, b in spans),
        "kernels_a_step": len(within) / count,
        "idle_within": idle / count,
        "outside_of_replays": sum(e["dur"] for e in within if e["args"].get("correlation") not in replays) / count,
        "kernels": {name: total / count for name, total in kernels.most_common(12)},
    }


def between(stamps: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> dict[str, float]:
    """Microseconds from step to step, and of that outside of any replay, without a profiler."""
    if len(stamps) < 2:
        return {}
    pairs = list(itertools.pairwise(stamps))
    gaps = [1000 * before[1].elapsed_time(after[0]) for before, after in pairs]
    return {
        "step": 1000 * stamps[0][0].elapsed_time(stamps[-1][0]) / len(pairs),
        "idle_between": statistics.median(gaps),
        "mean_idle_between": statistics.fmean(gaps),
        "longest_idle_between": max(gaps),
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
    print(f"| from begin to begin | {found['step']:.1f} |")
    print(f"| between two replays, median | {found['idle_between']:.1f} |")
    print(f"| mean, longest | {found['mean_idle_between']:.1f}, {found['longest_idle_between']:.1f} |")
    print(f"| one replay, under the profiler | {found['replay']:.1f} |")
    print(f"| idle between the {found['kernels_a_step']:.0f} kernels of a step | {found['idle_within']:.1f} |")
    print(f"| kernels outside of the recorded step | {found['outside_of_replays']:.1f} |")
    for name, spent in found["kernels"].items():
        print(f"| `{name}` | {spent:.1f} |")


if __name__ == "__main__":
    main()
    os._exit(0)  # workers of the compiler may linger
