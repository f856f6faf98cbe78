"""A profile with round numbers, to check formulas by hand."""

from __future__ import annotations

from typing import Any

from distributed_training.planning.profile import BACKWARD_OVER, UPDATE, Profile

MB = 1e6
WEIGHTS = [40 * MB, 40 * MB, 20 * MB]
"""Of three parameters, the first of the model first; the backward pass comes to the last one first."""


def profile(device: str = "cuda", precision: str = "fp32", activations: float = 1 * MB) -> Profile:
    """Adam, fp32; `activations` for each sample, gone when the backward pass is through; 1 ms a sample forward."""
    found: dict[int, dict[str, Any]] = {}
    for size in (8, 16):
        held, there = 3 * sum(WEIGHTS), 0.0  # weights and two averages
        timeline: list[tuple[int, float]] = []
        for left, number in zip((3, 2, 1), (2, 1, 0)):
            there += WEIGHTS[number]
            timeline.append((number, held + there + activations * size * left / 3))
        timeline += [(UPDATE, held + there), (BACKWARD_OVER, held + there), (UPDATE, held + there)]
        found[size] = {
            "timeline": timeline,
            "parts": {"forward": size * 1e-3, "backward": size * 2e-3, "update": 5e-4, "loop": 5e-4},
            "ready": [(2, 0.3), (1, 0.6), (0, 1.0)],
            "step": size * 3e-3 + 1e-3,
            "spread": 0.0,
        }
    model = {
        "name": "Made",
        "parameters": 25_000_000,
        "names": ["a", "b", "c"],
        "shapes": [[1000, 10000], [1000, 10000], [1000, 5000]],
        "bytes": WEIGHTS,
        "state_bytes": [2 * size for size in WEIGHTS],
        "units": [0, 1, -1],
        "frozen_bytes": 0,
        "buffer_bytes": 0,
        "has_batchnorm": False,
        "optimizer": "AdamW",
        "precision": precision,
        "samples": 1000,
        "process_bytes": 0.0,
        "device_memory": 80e9,
        "copy_rate": 2e12,
        "machine": {"device": device},
    }
    return Profile(model, {1: found})
