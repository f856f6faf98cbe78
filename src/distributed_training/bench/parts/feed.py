"""Batches from another process: how fast they come beside plain sockets, and what training loses by receiving them."""

from __future__ import annotations

import os
from typing import Any

import torch

from distributed_training.bench.choosing import choose
from distributed_training.bench.fed_training import SOURCES
from distributed_training.bench.figures import Figure, PartResult, Plot
from distributed_training.bench.jobs import JOBS, Job
from distributed_training.bench.loops import sized
from distributed_training.bench.options import BenchOptions
from distributed_training.bench.rotation import Forks, Rotation
from distributed_training.bench.transport import ours, raw
from distributed_training.bench.transport.base import CASES, Run, measure
from distributed_training.bench.turn_process import Start
from distributed_training.runtime.device import choose_device

NAME = "feed"
RATE, VOLUME, TIME, WAITING = "batches a second", "volume", "time a step", "share of the time that training waits"
ABOUT = (
    "A loader process hands batches of three sizes to another process of this machine: by our feed over TCP "
    "(`ours-tcp`), encrypted as between machines (`ours-tls`) and in shared memory (`ours-shared`), and by plain "
    "sockets that send one prepared batch again and again (`raw`; `raw-tls` encrypted) or rows gathered from a dataset "
    "as ours does (`raw-rows`). Then the same training on arrays in "
    "memory, on batches that lie on the GPU already, and over the split: the ratio is the time a step to that without "
    "any transfer."
)
WAYS: dict[str, Run] = {
    "raw": raw.WAYS["raw sockets"],
    "raw-rows": raw.WAYS["raw sockets, rows of a dataset"],
    "raw-tls": raw.WAYS["raw sockets, TLS"],
    "ours-tcp": ours.WAYS["ours, TCP"],
    "ours-tls": ours.WAYS["ours, TLS"],
    "ours-shared": ours.WAYS["ours, shared memory"],
}
_CARRYING = "distributed_training.bench.parts.feed:turn"
_TRAINING = "distributed_training.bench.fed_training:run"
_SIZES = {name.replace(" ", ""): name for name in CASES}  # as they are named on the command line
_JOBS = {"cpu": ("mlp", "mlp-25m", "resnet18"), "cuda": ("resnet50-224",)}
_CASES = [*_SIZES, *(f"training-{name}" for names in _JOBS.values() for name in names)]
_GPU_WORKERS = 8


def run(options: BenchOptions) -> PartResult:
    """Measure the sizes and trainings asked for; without, all that fit the device."""
    device = choose_device(options.device)
    trainings = [f"training-{name}" for name in _JOBS["cuda" if device.type == "cuda" else "cpu"]]
    usual = [*_SIZES][:1] + trainings[:1] if options.quick else [*_SIZES, *trainings]
    cases = choose(options.cases, _CASES, usual, "--cases")
    variants = choose(options.variants, [*WAYS, *SOURCES], [*WAYS, *SOURCES], "--variants")
    result = PartResult(name=NAME, title="Feed", about=ABOUT)
    if sizes := [_SIZES[case] for case in cases if case in _SIZES]:
        with Forks(_CARRYING, options) as forks:
            forks.ready()
            for size in sizes:
                result.figures += _carrying(size, [name for name in variants if name in WAYS], options, forks)
    for case in cases:
        if case not in _SIZES:
            job, chosen = JOBS[case.removeprefix("training-")], [name for name in variants if name in SOURCES]
            result.figures += _training(job, chosen, device, options, result)
    result.plots = [
        Plot(title="Batches a second, to raw sockets", quantity=RATE),
        Plot(title="Time a step, to data in memory", quantity=TIME),
    ]
    return result


def turn(**order: Any) -> dict[str, float]:
    """One turn, in a fork: batches a second of one way."""
    return {"rate": measure(WAYS[order["way"]], CASES[order["case"]], order["seconds"])}


def _carrying(case: str, ways: list[str], options: BenchOptions, forks: Forks) -> list[Figure]:
    seconds = 0.3 if options.quick else 1.0
    orders = {way: {"way": way, "case": case, "seconds": seconds} for way in ways}
    found = forks.measure(orders, f"batches of {case}")
    size = CASES[case].rows * (CASES[case].width * 4 + 8) / 1e6
    common: dict[str, Any] = {"part": NAME, "case": f"batches of {case}"}
    common["reference"] = "raw" if "raw" in ways else None
    figures = []
    for quantity, unit, factor in ((RATE, "batches/s", 1.0), (VOLUME, "MB/s", size)):
        figures += [
            Figure(values=[a["rate"] * factor for a in answers], quantity=quantity, variant=way, unit=unit, **common)
            for way, answers in found.items()
        ]
    return figures


def _training(
    job: Job, sources: list[str], device: torch.device, options: BenchOptions, result: PartResult
) -> list[Figure]:
    job = sized(job, options)
    cuda = device.type == "cuda"
    workers = min(_GPU_WORKERS, max(1, (os.cpu_count() or 2) - 2)) if cuda else 1
    case = f"training {job.title}, batch {job.batch_size}, {workers} loader worker{'s' * (workers > 1)}"
    changes = {"batch_size": job.batch_size, "warm": job.warm, "steps": job.steps}
    common: dict[str, Any] = {"job": job.name, "changes": changes, "device": device.type, "workers": workers}
    common["threads"] = job.threads or (0 if cuda else 1)  # on a CPU the loader has the other core
    fit = [name for name in sources if cuda or name != "resident"]
    with Rotation(options, case) as rotation:
        rotation.set_up({name: Start(_TRAINING, {**common, "source": name}) for name in fit})
        found = rotation.measure()
    result.skipped |= {f"{name} ({case})": why for name, why in rotation.failed.items()}
    reference = next((name for name in ("resident", "in-memory") if name in found), None)
    figures = [
        Figure(
            values=[a["seconds"] * 1e6 for a in answers],
            part=NAME,
            case=case,
            quantity=TIME,
            variant=name,
            unit="us",
            better="lower",
            reference=reference,
        )
        for name, answers in found.items()
    ]
    shares = {name: [a["wait_share"] for a in answers] for name, answers in found.items() if name.startswith("split")}
    return figures + [
        Figure(values=share, part=NAME, case=case, quantity=WAITING, variant=name, unit="", better="lower")
        for name, share in shares.items()
    ]
