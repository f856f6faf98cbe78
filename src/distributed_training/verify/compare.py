"""Two records of training side by side: where the second leaves the first, and whether rounding explains it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed_training.runtime.run_directory import read_jsonl
from distributed_training.training.difference import relative
from distributed_training.training.recorder import FACTS, STEPS

LOSS = "loss"
ROUNDING = 10.0
"""A difference counts when it is this many times what a change in the last bit of the starting weights has become."""
SENSITIVE = 1e-3
"""Where such a change has grown to this, two equal trainings go apart by chance, and nothing can be judged."""
Curve = dict[int, dict[str, float]]  # differences by step and tensor


@dataclass(frozen=True)
class Record:
    """What a training wrote down."""

    facts: dict[str, Any]
    steps: dict[int, dict[str, Any]]
    """By number of steps taken; 0 is the start."""

    @property
    def length(self) -> int:
        """Steps taken."""
        return max(self.steps, default=0)


def read_record(folder: Path) -> Record | None:
    """The record in a folder, if there is one."""
    if not (folder / FACTS).is_file():
        return None
    steps = {line["step"]: line for line in read_jsonl(folder / STEPS)}
    return Record(json.loads((folder / FACTS).read_text(encoding="utf-8")), steps)


@dataclass
class Deviation:
    """How far a training is from the reference."""

    loss: float = 0.0
    """Largest relative difference in loss over all steps."""
    weights: float = 0.0
    """Largest relative difference of a tensor over all steps."""
    tensor: str = ""
    """The tensor that has it."""
    first_step: int | None = None
    """The first step with a difference past what is allowed."""
    where: str = ""
    """The tensor in which it is farthest past it there, or `loss`."""
    found: float = 0.0
    """That difference."""
    allowed: float = 0.0
    """What would have been allowed."""


def rounding(nudged: Record, reference: Record) -> Curve:
    """What a change in the last bit of the starting weights becomes, up to where it has grown past all bounds."""
    curve: Curve = {}
    for step, apart in _differences(nudged, reference):
        if step > 1 and max(apart.values(), default=0.0) > SENSITIVE:
            break
        curve[step] = apart
    return curve


def measure(record: Record, reference: Record, tolerance: float, noise: Curve) -> Deviation:
    """The deviation of a record from the reference, over the steps that can be judged.

    Allowed is `tolerance`, or ROUNDING times the noise up to that step if that is more: for the loss its own, for a
    tensor the largest of all tensors. Which of them rounding hits is chance.
    """
    result = Deviation()
    loss_noise = weights_noise = 0.0
    for step, apart in _differences(record, reference):
        if step not in noise:
            break
        result.loss = max(result.loss, apart.get(LOSS, 0.0))
        for name, value in apart.items():
            if name != LOSS and value > result.weights:
                result.weights, result.tensor = value, name
        loss_noise = max(loss_noise, noise[step].get(LOSS, 0.0))
        weights_noise = max([weights_noise, *(value for name, value in noise[step].items() if name != LOSS)])
        allowed = {name: max(tolerance, ROUNDING * (loss_noise if name == LOSS else weights_noise)) for name in apart}
        past = {name: _times(value, allowed[name]) for name, value in apart.items() if value > allowed[name]}
        if past and result.first_step is None:
            result.where = max(past, key=past.__getitem__)
            result.first_step, result.found, result.allowed = step, apart[result.where], allowed[result.where]
    return result


def first_other_batch(record: Record, reference: Record) -> int | None:
    """The first step whose samples are not those of the reference."""
    for step in range(1, min(record.length, reference.length) + 1):
        if record.steps[step]["ids"] != reference.steps[step]["ids"]:
            return step
    return None


def _differences(record: Record, reference: Record) -> Iterator[tuple[int, dict[str, float]]]:
    largest = 0.0
    for step in sorted(record.steps.keys() & reference.steps.keys()):
        line, apart = record.steps[step], {}
        if LOSS in line:
            wanted = float(reference.steps[step][LOSS])
            # A loss that goes to zero is no better known than it was at first: its size is the largest so far.
            largest = max(largest, abs(wanted)) if math.isfinite(wanted) else largest
            apart[LOSS] = relative(wanted, float(line[LOSS]), largest)
        apart |= {name: float(value) for name, value in line.get("weights", {}).items()}
        yield step, apart


def _times(value: float, allowed: float) -> float:
    return value / allowed if allowed else math.inf
