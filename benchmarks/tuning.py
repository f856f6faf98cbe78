"""What a search costs beside Ray Tune used by hand, and what one feed for all trials saves.

    python benchmarks/tuning.py [overhead] [shared] [--rounds 3] [--quick]

`overhead`: eight trials, two at a time, by a plain Ray Tune script as Ray's own pages show it (a hand-written training
function that reports and checkpoints every epoch), and by `HPORunner`, whose trials are ordinary runs. Same model,
data, parameters and steps; the time is that of the whole search, its records, best.yaml and report included.
`shared`: two trials at a time whose preprocessing dominates, each loading for itself against one feed for both.

Variants take turns in one run, in one Ray of this machine. Writes benchmarks/results/tuning.json and .md; `--quick`
only shows that all of it runs, with trials too short to say anything, and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
SCRATCH = Path(tempfile.mkdtemp(prefix="tuning-"))
CONCURRENT = 2
SAMPLES, FEATURES, CLASSES = 60_000, 128, 10
EPOCHS = 6  # some eight seconds a trial: what a search does beside its trials would be seen at 3 %
HIDDEN = [512, 512]
RATES, BATCHES = (3e-4, 1e-3, 3e-3, 1e-2), (128, 256)


@dataclass(frozen=True)
class Trials:
    """How many there are and how long each is: a search to measure, or one that only warms up."""

    rates: tuple[float, ...] = RATES
    batches: tuple[int, ...] = BATCHES
    epochs: int = EPOCHS


SHORT = Trials(RATES[:2], BATCHES[:1], 1)


def make_data() -> Path:
    """Classes that lie around centres, as one .npz file that both sides read."""
    import numpy as np

    random = np.random.default_rng(0)
    labels = random.integers(CLASSES, size=SAMPLES)
    centres = random.normal(size=(CLASSES, FEATURES)) * 0.35
    inputs = (centres[labels] + random.normal(size=(SAMPLES, FEATURES))).astype(np.float32)
    held = SAMPLES // 6
    file = SCRATCH / "data.npz"
    parts = {"x": inputs[held:], "y": labels[held:], "val_x": inputs[:held], "val_y": labels[:held]}
    np.savez(file, **parts)
    return file


def by_hand(config: dict[str, Any]) -> None:
    """The training function of a plain script: what a careful user writes, batches gathered whole."""
    import math
    import os
    import tempfile
    from itertools import pairwise

    import numpy as np
    import torch
    from ray import tune
    from torch import nn

    torch.manual_seed(0)
    torch.set_num_threads(1)
    with np.load(config["file"]) as arrays:
        x, y, val_x, val_y = (torch.from_numpy(arrays[name]) for name in ("x", "y", "val_x", "val_y"))
    sizes = [x.shape[1], *config["hidden"], 10]
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())][:-1]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"], weight_decay=0.01, fused=config["fused"])
    criterion = nn.CrossEntropyLoss()
    batch, epochs = config["batch_size"], config["epochs"]
    steps = math.ceil(len(x) / batch)

    def cosine(step: int) -> float:
        return min(1.0, step / steps) * 0.5 * (1 + math.cos(math.pi * step / (steps * epochs)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine)
    for epoch in range(epochs):
        model.train()
        for chosen in torch.randperm(len(x)).split(batch):
            optimizer.zero_grad()
            loss = criterion(model(x[chosen]), y[chosen])
            loss.backward()
            optimizer.step()
            schedule.step()
        model.eval()
        with torch.no_grad():
            outputs = [model(part) for part in val_x.split(batch)]
            scores = torch.cat(outputs)
            val_loss, right = criterion(scores, val_y).item(), (scores.argmax(1) == val_y).float().mean().item()
        with tempfile.TemporaryDirectory() as folder:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(state, os.path.join(folder, "checkpoint.pt"))
            metrics = {"val_loss": val_loss, "val_accuracy": right, "epoch": epoch + 1}
            tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(folder))


def plain(file: Path, fused: bool, trials: Trials) -> tuple[float, float]:
    """Seconds of the plain script, and the best accuracy it found."""
    from ray import tune

    space = {
        "lr": tune.grid_search(list(trials.rates)),
        "batch_size": tune.grid_search(list(trials.batches)),
        "file": str(file),
        "hidden": HIDDEN,
        "epochs": trials.epochs,
        "fused": fused,
    }
    folder = SCRATCH / f"plain-{time.time_ns()}"
    start = time.perf_counter()
    tuner = tune.Tuner(
        tune.with_resources(by_hand, {"cpu": 1}),
        param_space=space,
        tune_config=tune.TuneConfig(metric="val_accuracy", mode="max", max_concurrent_trials=CONCURRENT),
        run_config=tune.RunConfig(
            storage_path=str(folder), verbose=0, checkpoint_config=tune.CheckpointConfig(num_to_keep=2)
        ),
    )
    results = tuner.fit()
    seconds = time.perf_counter() - start
    assert not results.errors, results.errors
    best = results.get_best_result().metrics["val_accuracy"]
    shutil.rmtree(folder, ignore_errors=True)
    return seconds, best


def ours(file: Path, trials: Trials) -> tuple[float, float]:
    """Seconds of the same search by HPORunner, and the best accuracy it found."""
    from distributed_training.config import Config
    from distributed_training.tuning import HPORunner

    folder = SCRATCH / f"ours-{time.time_ns()}"
    config = Config.from_dict(
        {
            "model": {"name": "mlp", "args": {"hidden": HIDDEN}},
            "data": {"dataset": "numpy", "root": str(file)},
            "training": {"epochs": trials.epochs, "optimizer": "adamw", "weight_decay": 0.01},
            "run": {"root": str(folder), "progress": "off"},
            "tuning": {"max_concurrent": CONCURRENT, "scheduler": "none", "objectives": {"val_accuracy": "max"}},
        }
    )
    space = {"training.lr": {"choice": list(trials.rates)}, "training.batch_size": {"choice": list(trials.batches)}}
    start = time.perf_counter()
    results = HPORunner(config=config).run_grid_search(space)
    seconds = time.perf_counter() - start
    assert not results.errors, results.errors
    assert len(results) == len(trials.rates) * len(trials.batches)
    best = results.get_best_result("val_accuracy", "max").metrics["val_accuracy"]
    shutil.rmtree(folder, ignore_errors=True)
    return seconds, best


def overhead(rounds: int, quick: bool) -> dict[str, Any]:
    """The whole search by hand and by ours."""
    from distributed_training.bench.measure import interleave, ratio

    file, found = make_data(), dict[str, float]()
    searches: dict[str, Callable[[Trials], tuple[float, float]]] = {
        "plain": lambda trials: plain(file, False, trials),
        "plain, fused optimizer": lambda trials: plain(file, True, trials),
        "ours": lambda trials: ours(file, trials),
    }

    def timed(name: str) -> Callable[[], float]:
        def once() -> float:
            seconds, found[name] = searches[name](SHORT if quick else Trials())
            print(f"{name}: {seconds:.1f} s, best accuracy {found[name]:.4f}", flush=True)
            return seconds

        return once

    for search in searches.values():
        search(SHORT)
    measured = interleave({name: timed(name) for name in searches}, rounds, warmup=0)
    return {
        name: {
            "seconds": one.median,
            "spread": one.spread,
            "time of ours, to this": ratio(measured, "ours", name),
            "best accuracy": found[name],
        }
        for name, one in measured.items()
    }


COSTLY = """
import time

def _work():
    end = time.thread_time() + 0.001  # of the processor, not of the clock: waiting for a core is not work
    while time.thread_time() < end:
        pass

def fixed(sample):
    _work()
    return sample

def random(sample, rng):
    _work()
    image, label = sample
    return image + float(rng.normal()), label
"""


def costly(preprocess: str, share_feed: str, loaders: int = 0, epochs: int = 6) -> tuple[float, float]:
    """Seconds of a search of four trials, two at a time, whose samples take 1 ms each, and the best accuracy."""
    from distributed_training.config import Config
    from distributed_training.tuning import HPORunner

    folder = SCRATCH / f"costly-{time.time_ns()}"
    config = Config.from_dict(
        {
            "model": {"name": "mlp", "args": {"hidden": [32]}},
            "data": {
                "dataset": "synthetic",
                "args": {"samples": 2500, "shape": [1, 16, 16]},
                "preprocess": f"costly_samples:{preprocess}",
                "num_workers": loaders,
            },
            "training": {"epochs": epochs},
            "run": {"root": str(folder), "progress": "off"},
            "tuning": {
                "max_concurrent": CONCURRENT,
                "scheduler": "none",
                "objectives": {"val_accuracy": "max"},
                "share_feed": share_feed,
            },
        }
    )
    space = {"training.lr": {"choice": [1e-3, 1e-2]}, "training.batch_size": {"choice": [32, 64]}}
    start = time.perf_counter()
    results = HPORunner(config=config).run_grid_search(space)
    seconds = time.perf_counter() - start
    assert not results.errors, results.errors
    assert len(results) == 4
    best = results.get_best_result("val_accuracy", "max").metrics["val_accuracy"]
    shutil.rmtree(folder, ignore_errors=True)
    return seconds, best


def shared(rounds: int, quick: bool) -> dict[str, Any]:
    """Trials that load for themselves, and trials that share one feed: the whole search, the feed's start included."""
    from distributed_training.bench.measure import interleave, ratio

    (SCRATCH / "costly_samples.py").write_text(COSTLY, encoding="utf-8")
    before, found = Path.cwd(), dict[str, float]()
    ways = {
        "each for itself": {"share_feed": "off"},
        "each for itself, a loader process each": {"share_feed": "off", "loaders": 1},
        "one feed": {"share_feed": "auto"},
    }

    def timed(name: str, preprocess: str, settings: dict[str, Any]) -> Callable[[], float]:
        def once() -> float:
            seconds, found[name] = costly(preprocess, **settings, epochs=1 if quick else 6)
            print(f"{name}: {seconds:.1f} s, best accuracy {found[name]:.4f}", flush=True)
            return seconds

        return once

    kinds = {"random preprocessing": "random", "the same in every epoch": "fixed"}
    variants = {
        f"{kind}, {way}": timed(f"{kind}, {way}", function, settings)
        for kind, function in kinds.items()
        for way, settings in ways.items()
    }
    os.chdir(SCRATCH)  # where the module of the preprocessing is
    try:
        measured = interleave(variants, rounds, warmup=0 if quick else 1)
    finally:
        os.chdir(before)
    for kind in kinds:  # exact: every trial saw the batches that it would have loaded for itself
        assert len({found[name] for name in found if name.startswith(kind)}) == 1, found
    return {
        name: {
            "seconds": one.median,
            "spread": one.spread,
            "one feed is faster by": ratio(measured, name, f"{name.split(', ')[0]}, one feed"),
            "best accuracy": found[name],
        }
        for name, one in measured.items()
    }


PARTS: dict[str, Callable[[int, bool], dict[str, Any]]] = {"overhead": overhead, "shared": shared}


def main() -> None:
    """Measure what was asked for and write the report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all unless given")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="see that it runs; nothing is written")
    arguments = parser.parse_args()
    unknown = [part for part in arguments.parts if part not in PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]}; there are {', '.join(PARTS)}")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["OMP_NUM_THREADS"] = "1"
    import ray
    import torch

    from distributed_training.runtime.device import machine_facts

    file = RESULTS / "tuning.json"
    report: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    ray.init(
        num_cpus=CONCURRENT,
        include_dashboard=False,
        object_store_memory=150_000_000,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        for part in arguments.parts or PARTS:
            figures = PARTS[part](arguments.rounds, arguments.quick)
            facts = machine_facts(torch.device("cpu"))
            facts.pop("host", None)
            report[part] = {"machine": facts, "ray": ray.__version__, "rounds": arguments.rounds, "figures": figures}
            print(json.dumps({part: figures}, indent=2), flush=True)
            if arguments.quick:
                continue
            RESULTS.mkdir(exist_ok=True)
            file.write_text(json.dumps(report, indent=2) + "\n")
            file.with_suffix(".md").write_text(markdown(report))
    finally:
        ray.shutdown()
        shutil.rmtree(SCRATCH, ignore_errors=True)


def markdown(report: dict[str, Any]) -> str:
    """The report as tables."""
    lines = [
        "# Searches",
        "",
        "Variants take turns in one run; figures are medians, ratios are taken round by round.",
        "",
    ]
    for part in (name for name in PARTS if name in report):
        there = report[part]
        machine = there["machine"]
        lines += [f"## {part}", ""]
        command = f"`python benchmarks/tuning.py {part} --rounds {there['rounds']}`"
        lines += [f"{command}: {machine['cpu_cores']} cores, torch {machine['torch']}, Ray {there['ray']}.", ""]
        rows = there["figures"]
        columns = list(next(iter(rows.values())))
        lines += [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        lines += [f"| {name} | {' | '.join(f'{row[c]:,.3f}' for c in columns)} |" for name, row in rows.items()]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
