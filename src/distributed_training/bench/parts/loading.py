"""How fast samples are loaded: by our loader, by torch's DataLoader with the same workers, and through the split."""

from __future__ import annotations

import os
from typing import Any

from distributed_training.bench.choosing import choose
from distributed_training.bench.figures import Figure, PartResult, Plot
from distributed_training.bench.options import BenchOptions
from distributed_training.bench.rotation import Forks
from distributed_training.runtime.device import choose_device

NAME = "loading"
RATE = "samples a second"
ABOUT = (
    "Shuffled batches of 64 images of 64 pixels, until they are on the device. `ours-2` is our loader with two worker "
    "processes, `torch-2` torch's DataLoader with as many, each with its usual settings; `split-2` a loader process "
    "with two workers that hands batches over in shared memory, `split-tcp-2` the same over TCP on this machine; "
    "`resident`, on a GPU, an array that lies in its memory, which is what a training does with one that fits. Ours is "
    "compared with torch's loader of as many workers, the split with our own of as many."
)
CASES = {
    "arrays": "samples in an array: a batch is one gather",
    "worked": "a dataset with work in every sample",
}
_TARGET = "distributed_training.bench.loading:turn"
_MOST = 8  # workers, unless --processes says otherwise


def run(options: BenchOptions) -> PartResult:
    """Measure every number of workers, pinned and not where there is a GPU."""
    device = choose_device(options.device).type
    known = _variants(_workers(options), cuda=device == "cuda")
    chosen = choose(options.variants, known, list(known), "--variants")
    result = PartResult(name=NAME, title="Loading", about=ABOUT)
    cases = choose(options.cases, CASES, list(CASES), "--cases")
    with Forks(_TARGET, options) as forks:
        forks.ready()
        for case in cases:
            common: dict[str, Any] = {"kind": case, "device": device, "seconds": 0.25 if options.quick else 1.0}
            able = [name for name in chosen if case == "arrays" or known[name]["way"] != "resident"]
            found = forks.measure({name: {**common, **known[name]} for name in able}, CASES[case])
            result.figures += [
                Figure(
                    values=[answer["rate"] for answer in answers],
                    part=NAME,
                    case=CASES[case],
                    quantity=RATE,
                    variant=name,
                    unit="samples/s",
                    reference=_reference(name, chosen),
                )
                for name, answers in found.items()
            ]
    if device != "cuda":
        result.skipped["pinned memory"] = "it is for copies to a GPU, and there is none"
    result.plots = [Plot(title="Samples a second", quantity=RATE, show="values")]
    return result


def _workers(options: BenchOptions) -> list[int]:
    """0, 1, 2, 4, ... up to the cores of the machine; `--processes` says otherwise."""
    if options.processes:
        return sorted({0, *options.processes})
    most = min(_MOST, os.cpu_count() or 1)
    return [0, most] if options.quick else [0, *(2**n for n in range(most.bit_length()))]


def _variants(workers: list[int], *, cuda: bool) -> dict[str, dict[str, Any]]:
    variants: dict[str, dict[str, Any]] = {}
    for pinned in (False, True) if cuda else (False,):
        for way in ("torch", "ours"):
            for count in workers:
                name = f"{way}-{count}{'-pinned' * pinned}"
                variants[name] = {"way": way, "workers": count, "pinned": pinned}
    if cuda:
        variants["resident"] = {"way": "resident", "workers": 0, "pinned": False}
    for way in ("split", "split-tcp"):  # the feed receives into pinned memory by itself
        for count in [n for n in workers if n]:
            variants[f"{way}-{count}"] = {"way": way, "workers": count, "pinned": False}
    return variants


def _reference(name: str, chosen: list[str]) -> str | None:
    """Ours beside torch's with the same workers and memory, the split beside ours with as many workers."""
    if name == "resident":
        return None
    way, _, rest = name.rpartition("-") if not name.endswith("-pinned") else name.partition("-")
    wanted = {"ours": f"torch-{rest}", "torch": name}.get(way, f"ours-{rest}")
    return wanted if wanted in chosen else None
