"""What each arithmetic brings and costs: the same training by our Trainer in fp32, tf32, fp16 and bf16."""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import dataclass
from typing import Any

import torch

from distributed_training.bench.choosing import choose
from distributed_training.bench.figures import Figure, PartResult, Plot
from distributed_training.bench.job_config import base_config, describe
from distributed_training.bench.jobs import JOBS, Job
from distributed_training.bench.loops import LOOPS, ours, process_arguments, sized
from distributed_training.bench.options import BenchOptions
from distributed_training.bench.rotation import Answers, Rotation
from distributed_training.bench.turn_process import Start
from distributed_training.runtime.device import choose_device

NAME = "precision"
THROUGHPUT, TIME, LOSS, MEMORY = "throughput", "time a step", "final loss", "peak memory"
ABOUT = (
    "The same training from the same seed by our Trainer, with `training.precision`, `training.channels_last` and "
    "`training.compile` set as each variant says and everything else at its defaults, so that steps are captured as "
    "CUDA graphs where that is possible. The ratio of the throughputs is the speed-up over fp32. The final loss is the "
    "mean over the last steps after the same number of steps: it differs by rounding, and should differ by no more."
)
_TAIL = 10  # steps that the final loss is the mean of

VARIANTS: dict[str, dict[str, Any]] = {
    f"{precision}{'-channels-last' if last else ''}{'-compile' if compiled else ''}": {
        "precision": precision,
        "channels_last": "on" if last else "off",
        "compile": compiled,
    }
    for precision in ("fp32", "tf32", "fp16", "bf16")
    for last in (False, True)
    for compiled in (False, True)
    if not last or precision in ("fp16", "bf16")
}
_CASES = {"cuda": ("resnet50-128", "resnet50-1024", "gpt2"), "cpu": ("mlp", "resnet18")}


def run(options: BenchOptions) -> PartResult:
    """Measure every precision that the device has, with the user's own job where one was given."""
    device = choose_device(options.device)
    variants = choose(options.variants, VARIANTS, list(VARIANTS), "--variants")
    result = PartResult(name=NAME, title="Precision", about=ABOUT)
    usual = _CASES["cuda" if device.type == "cuda" else "cpu"][: 1 if options.quick else None]
    cases = choose(options.cases, JOBS, usual, "--cases")
    if options.config is not None and not options.cases:
        _measure(_own(options, device), device, variants, options, result)
    else:
        for name in cases:
            _measure(_named(sized(JOBS[name], options), device), device, variants, options, result)
    result.plots = [Plot(title="Speed-up over fp32", quantity=THROUGHPUT), Plot(title="Final loss", quantity=LOSS)]
    return result


@dataclass(frozen=True)
class _Subject:
    """What is trained: a job of ours, or the user's own."""

    case: str
    target: str
    arguments: dict[str, Any]
    samples: int
    """In a step."""
    unit: str
    images: bool


def _named(job: Job, device: torch.device) -> _Subject:
    samples = job.batch_size * (job.shape[0] if job.kind == "tokens" else 1)
    unit = {"tokens": "tokens/s", "images": "images/s"}.get(job.kind, "samples/s")
    arguments = {**process_arguments(job, device), "losses": min(_TAIL, job.steps)}
    case = f"{job.title}, batch {job.batch_size}"
    return _Subject(case, LOOPS["ours"].target, arguments, samples, unit, job.kind == "images")


def _own(options: BenchOptions, device: torch.device) -> _Subject:
    config = base_config(options, device.type)
    warm, steps = (2, 6) if options.quick else (5, 30)
    arguments = {"config": config.to_dict(), "warm": warm, "steps": steps, "losses": min(_TAIL, steps)}
    case = f"{describe(config)}, batch {config.training.batch_size}"
    return _Subject(case, f"{ours.__name__}:run_config", arguments, config.training.batch_size, "samples/s", True)


def _measure(
    subject: _Subject, device: torch.device, variants: list[str], options: BenchOptions, result: PartResult
) -> None:
    starts: dict[str, Start] = {}
    for name in variants:
        settings = VARIANTS[name]
        if why := unfit(settings, device):
            result.skipped[name] = why
        elif settings["channels_last"] == "off" or subject.images:
            starts[name] = Start(subject.target, {**subject.arguments, "settings": settings})
    with Rotation(options, subject.case) as rotation:
        rotation.set_up(starts)
        answers = rotation.measure()
    result.skipped |= {f"{name} ({subject.case})": why for name, why in rotation.failed.items()}
    result.figures += _figures(subject, answers)


def unfit(settings: dict[str, Any], device: torch.device) -> str:
    """Why a device cannot do this, or nothing."""
    name, cuda = settings["precision"], device.type == "cuda"
    if not cuda and name in ("tf32", "fp16"):
        return f"{name} is for GPUs; on the CPU there are fp32 and bf16"
    if not cuda and settings["channels_last"] == "on":
        return "channels last is measured on GPUs, whose tensor cores want it"
    if cuda and name in ("tf32", "bf16") and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} has no {name}"
    if settings["compile"] and not cuda and not any(map(shutil.which, ("g++", "c++", "clang++"))):
        return "torch.compile needs a C++ compiler, and there is none"
    if settings["compile"] and cuda and importlib.util.find_spec("triton") is None:
        return "torch.compile needs triton, which is not installed"
    return ""


def _figures(subject: _Subject, answers: Answers) -> list[Figure]:
    common: dict[str, Any] = {"part": NAME, "case": subject.case, "reference": "fp32" if "fp32" in answers else None}
    lower: dict[str, Any] = {**common, "better": "lower"}
    seconds = {name: [answer["seconds"] for answer in found] for name, found in answers.items()}
    figures = [
        Figure(
            values=[subject.samples / s for s in taken], quantity=THROUGHPUT, variant=name, unit=subject.unit, **common
        )
        for name, taken in seconds.items()
    ]
    figures += [
        Figure(values=[s * 1e6 for s in taken], quantity=TIME, variant=name, unit="us", **lower)
        for name, taken in seconds.items()
    ]
    figures += [
        Figure(values=[loss], quantity=LOSS, variant=name, unit="", **lower)
        for name, loss in final_losses(answers).items()
    ]
    figures += [
        Figure(values=[a["peak_bytes"] / 2**20 for a in found], quantity=MEMORY, variant=name, unit="MiB", **lower)
        for name, found in answers.items()
        if "peak_bytes" in found[0]
    ]
    return figures


def final_losses(answers: Answers) -> dict[str, float]:
    """The loss of each variant after the largest number of steps that all have made without a new start."""
    by_turn = {name: {answer["turn"]: answer["loss"] for answer in found} for name, found in answers.items()}
    shared = set.intersection(*[set(turns) for turns in by_turn.values()]) if by_turn else set()
    return {name: turns[max(shared)] for name, turns in by_turn.items()} if shared else {}
