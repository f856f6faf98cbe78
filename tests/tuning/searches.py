"""Searches made by hand, for what reads their records."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

from distributed_training.tuning.records import Search, SearchFolder, Trial

SPACE: dict[str, Any] = {
    "training.lr": {"loguniform": [1e-4, 1e-1]},
    "training.batch_size": {"choice": [32, 64, 128]},
    "training.optimizer": {"choice": ["adamw", "sgd"]},
    "training.momentum": {"uniform": [0.5, 0.99], "when": {"training.optimizer": "sgd"}},
    "model.args.hidden": {"int": [16, 256], "log": True},
}


def parameters(chance: random.Random) -> dict[str, Any]:
    """A draw from the space, its condition kept."""
    drawn: dict[str, Any] = {
        "training.lr": 10 ** chance.uniform(-4, -1),
        "training.batch_size": chance.choice([32, 64, 128]),
        "training.optimizer": chance.choice(["adamw", "sgd"]),
        "model.args.hidden": round(16 * 16 ** chance.random()),
    }
    if drawn["training.optimizer"] == "sgd":
        drawn["training.momentum"] = chance.uniform(0.5, 0.99)
    return drawn


def accuracy(drawn: dict[str, Any]) -> float:
    """What a trial comes to: the learning rate decides nearly everything, the optimizer a little."""
    distance = math.log10(drawn["training.lr"]) + 2.3
    return 0.97 - 0.14 * distance**2 - 0.03 * (drawn["training.optimizer"] == "sgd")


def make_search(
    folder: Path, number: int = 30, objectives: dict[str, Any] | None = None, seed: int = 0
) -> SearchFolder:
    """A search of `number` trials, of which a scheduler stopped every bad one after two epochs; the 5th failed."""
    chance = random.Random(seed)
    place = SearchFolder(folder)
    search = Search(
        name=folder.name,
        objectives=objectives or {"val_accuracy": "max"},
        space=SPACE,
        algorithm="bayesian",
        scheduler="asha",
        seed=seed,
        samples=number,
        status="completed",
        started=1_000_000.0,
        ended=1_000_754.0,
    )
    place.save(search)
    for n in range(number):
        drawn = parameters(chance)
        top = accuracy(drawn) + chance.gauss(0, 0.004)
        epochs = 8 if top > 0.86 or n < 3 else 2
        curve = [(float(e), max(0.1, top * (1 - 0.6 * math.exp(-0.7 * e)))) for e in range(1, epochs + 1)]
        seconds = epochs * drawn["model.args.hidden"] / 40
        trial = Trial(str(n + 1), drawn, "running", directory=f"trials/{n + 1}", started=1_000_000.0 + 20 * n)
        place.append(trial)  # the later line counts
        trial.history, trial.seconds = curve, seconds
        trial.last = trial.best = {"val_accuracy": curve[-1][1], "seconds": seconds}
        trial.status = "completed" if epochs == 8 else "stopped"
        if n == 4:
            error = "Traceback (most recent call last):\n  ...\nOutOfMemoryError: rank 0 ran out of memory"
            trial = Trial(trial.id, drawn, "failed", directory=trial.directory, error=error, attempts=2, seconds=3.0)
        place.append(trial)
    return place
