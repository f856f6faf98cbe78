"""Trainings of the tests' own: no torch, no time."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from distributed_training.tuning import report


def bowl(config: Any) -> None:
    """Least at x = 0.3, y = 2. Falls over three reports."""
    for epoch in range(3):
        report({"loss": (config["x"] - 0.3) ** 2 + abs(config["y"] - 2) + (2 - epoch) * 0.1, "cost": config["y"]})


def returns(config: Any) -> dict[str, float]:
    """Says its result only at the end, by its return value."""
    return {"val_loss": (config["lr"] - 0.01) ** 2}


def unlucky(config: Any) -> dict[str, float]:
    """Fails once with x = 1, always with x = 2, and takes the whole process with it once with x = 3."""
    place = Path(config["folder"]) / f"attempts-{config['x']}"
    attempt = int(place.read_text()) if place.exists() else 0
    place.write_text(str(attempt + 1))
    if config["x"] == 2 or (config["x"] == 1 and not attempt):
        raise RuntimeError(f"no luck with {config['x']}")
    if config["x"] == 3 and not attempt:
        os._exit(1)
    return {"score": config["x"]}


def speaks_of_others(config: Any) -> None:
    """Reports what nobody asked for."""
    report({"accuracy": 0.5, "depth": 3})


def says_nothing(config: Any) -> None:
    """Neither reports nor returns."""


def stubborn(config: Any) -> None:
    """Takes the search's wish that it end for a failure of its own, and reports on."""
    for epoch in range(3):
        try:
            report({"loss": config["x"] + 3 - epoch})
        except SystemExit:
            report({"loss": 0.0})


def half_a_gpu(config: Any) -> None:
    """Ends when another trial is on the same GPU."""
    (here := Path(config["folder"]) / f"trial-{config['x']}").touch()
    end = time.monotonic() + 120
    while len(list(here.parent.glob("trial-*"))) < 2:
        assert time.monotonic() < end, "no second trial came to this GPU"
        time.sleep(0.05)
    report({"loss": config["x"], "gpu": int(os.environ["CUDA_VISIBLE_DEVICES"])})
