"""The plan as both sides know it: as facts of a handshake, and as the ids that each step must have."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from distributed_training.data.plan import MAX_SAMPLES, Plan
from distributed_training.runtime.errors import DataError

_STEPS = 256  # ids of so many steps are computed together
_SAMPLES = 1 << 18
_KEPT = 4


def facts_of(plan: Plan) -> dict[str, Any]:
    """What a worker says of its plan; its version travels apart."""
    facts: dict[str, Any] = dict(plan.describe())
    del facts["plan_version"]
    return facts


def plan_from(facts: Mapping[str, Any]) -> Plan:
    """The plan that a worker describes. What it says is checked: it comes from the network."""
    kinds: dict[str, type] = {"samples": int, "batch_size": int, "seed": int, "shuffle": bool, "drop_last": bool}
    for name, kind in kinds.items():
        if type(facts.get(name)) is not kind:
            raise DataError(f"the loader says {name}={facts.get(name)!r}; both sides need the same release")
    plan = Plan(**{name: facts[name] for name in kinds}) if facts["batch_size"] >= 1 else None
    if plan is None or not 0 < plan.samples <= MAX_SAMPLES or plan.batch_size > plan.samples:
        raise DataError(f"the loader has {facts['samples']} samples in batches of {facts['batch_size']}")
    return plan


class PlannedIds:
    """Ids of steps, computed many at once and kept for as long as neighbours are asked for. Any thread may ask."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._steps = max(1, min(_STEPS, _SAMPLES // plan.batch_size))
        self._kept: dict[tuple[int, int], np.ndarray] = {}
        self._lock = threading.Lock()

    def __call__(self, epoch: int, step: int) -> np.ndarray:
        """Ids of a whole step."""
        plan, first = self._plan, step - step % self._steps
        ids = self._kept.get((epoch, first))
        if ids is None:
            ids = plan.span(epoch, first, min(first + self._steps, plan.steps_per_epoch))
            with self._lock:
                if len(self._kept) >= _KEPT:
                    del self._kept[next(iter(self._kept))]
                self._kept[epoch, first] = ids
        at = (step - first) * plan.batch_size
        return ids[at : at + plan.batch_size]
