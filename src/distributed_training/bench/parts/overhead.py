"""What a training loop costs: ours beside loops by hand and beside other libraries, on the same job."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from distributed_training.bench.choosing import choose
from distributed_training.bench.figures import Figure, PartResult, Plot
from distributed_training.bench.flops import decoder_flops_per_token, peak_flops
from distributed_training.bench.jobs import JOBS, Job
from distributed_training.bench.loops import LOOPS, process_arguments, sized
from distributed_training.bench.options import BenchOptions
from distributed_training.bench.rotation import Rotation
from distributed_training.bench.turn_process import Start
from distributed_training.runtime.device import choose_device

NAME = "overhead"
TIME, THROUGHPUT, MFU, BEST = "time a step", "throughput", "MFU", "speed of ours to the best by hand"
ABOUT = (
    "Microseconds a step, and how many times as long each loop takes as ours: above 1, ours is faster. All have the "
    "same model, batches in memory, batch size, optimizer and number of steps. Each loop is at its library's "
    "defaults, but for progress bars, loggers and checkpoints, which are off for all. The loops by hand and the "
    "other libraries get whole batches that lie on the device already; ours gets arrays in host memory, and shuffles "
    "and gathers them itself."
)
_CASES = {"cuda": ("mlp", "resnet50-128", "resnet50-1024", "gpt2"), "cpu": ("mlp", "resnet18")}


def run(options: BenchOptions) -> PartResult:
    """Measure the cases and loops asked for; without, all that fit the device and are installed."""
    device = choose_device(options.device)
    cases = choose(options.cases, JOBS, _CASES["cuda" if device.type == "cuda" else "cpu"], "--cases")
    loops = choose(options.variants, LOOPS, list(LOOPS), "--variants")
    result = PartResult(name=NAME, title="Overhead of the training loop", about=ABOUT)
    for name in cases:
        _case(sized(JOBS[name], options), device, loops, options, result)
    result.plots = [
        Plot(title="Time a step, to ours", quantity=TIME),
        Plot(title="Throughput", quantity=THROUGHPUT, show="values"),
    ]
    return result


def _case(job: Job, device: torch.device, loops: list[str], options: BenchOptions, result: PartResult) -> None:
    case = f"{job.title}, batch {job.batch_size}"
    starts: dict[str, Start] = {}
    for name in loops:
        loop = LOOPS[name]
        if why := loop.missing():
            result.skipped[name] = why
        elif why := loop.unfit(job, device.type):
            if options.variants:  # somebody asked for it by name
                result.skipped[f"{name} ({case})"] = why
        else:
            starts[name] = Start(loop.target, {**process_arguments(job, device), **loop.arguments})
    with Rotation(options, case) as rotation:
        rotation.set_up(starts)
        answers = rotation.measure()
    result.skipped |= {f"{name} ({case})": why for name, why in rotation.failed.items()}
    seconds = {name: [answer["seconds"] for answer in found] for name, found in answers.items()}
    result.figures += _figures(job, case, seconds, device)


def _figures(job: Job, case: str, seconds: dict[str, list[float]], device: torch.device) -> list[Figure]:
    if not seconds:
        return []
    reference = "ours" if "ours" in seconds else next(iter(seconds))
    common: dict[str, Any] = {"part": NAME, "case": case, "reference": reference}
    figures = [
        Figure(values=[s * 1e6 for s in taken], quantity=TIME, variant=name, unit="us", better="lower", **common)
        for name, taken in seconds.items()
    ]
    figures += _best(case, seconds)
    if job.kind == "vectors":
        return figures
    samples = job.batch_size * (job.shape[0] if job.kind == "tokens" else 1)
    unit = "tokens/s" if job.kind == "tokens" else "images/s"
    figures += [
        Figure(values=[samples / s for s in taken], quantity=THROUGHPUT, variant=name, unit=unit, **common)
        for name, taken in seconds.items()
    ]
    return figures + _utilisation(job, seconds, samples, device, common)


def _best(case: str, seconds: dict[str, list[float]]) -> list[Figure]:
    """Ours beside the fastest of the loops by hand, round by round."""
    by_hand = [name for name in seconds if LOOPS[name].by_hand]
    if not by_hand or "ours" not in seconds:
        return []
    best = min(by_hand, key=lambda name: statistics.median(seconds[name]))
    ratios = [theirs / own for theirs, own in zip(seconds[best], seconds["ours"])]
    return [Figure(values=ratios, part=NAME, case=case, quantity=BEST, variant=f"ours to {best}", unit="")]


def _utilisation(
    job: Job, seconds: dict[str, list[float]], tokens: int, device: torch.device, common: dict[str, Any]
) -> list[Figure]:
    """MFU of a decoder on a GPU that is known."""
    peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if job.kind != "tokens" or peak is None:
        return []
    with torch.device("meta"):
        model = job.build()
    a_token = decoder_flops_per_token(model, job.arguments["layers"], job.arguments["width"], job.shape[0])
    return [
        Figure(values=[tokens * a_token / s / peak for s in taken], quantity=MFU, variant=name, unit="", **common)
        for name, taken in seconds.items()
    ]
