"""The plan as both sides know it: as facts of a handshake, and as the ids that each step must have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from distributed_training.data.plan import MAX_SAMPLES, Plan
from distributed_training.runtime.errors import DataError

_STEPS = 1024  # ids of so many steps are computed together
_SAMPLES = 1 << 18
_KEPT = 4
_PLAN: dict[str, type] = {"samples": int, "batch_size": int, "seed": int, "shuffle": bool, "drop_last": bool}
_HELD_OUT = {"samples": "validation_samples", "batch_size": "validation_batch_size"}


@dataclass(frozen=True)
class EpochPlan:
    """An epoch of a feed: the steps of training, then those of validation."""

    train: Plan
    validation: Plan | None = None
    """Every held-out sample once, in the order of its dataset."""

    @property
    def steps(self) -> int:
        """Steps of both."""
        return self.train.steps_per_epoch + (self.validation.steps_per_epoch if self.validation is not None else 0)


def facts_of(plan: EpochPlan) -> dict[str, Any]:
    """What a worker says of its plan; its version travels apart."""
    facts: dict[str, Any] = dict(plan.train.describe())
    del facts["plan_version"]
    held_out = plan.validation
    if held_out is not None:
        facts |= {name: getattr(held_out, own) for own, name in _HELD_OUT.items()}
    return facts


def plan_from(facts: Mapping[str, Any]) -> EpochPlan:
    """The plan that a worker describes. What it says is checked: it comes from the network."""
    _check_kinds(facts, _PLAN)
    train = _checked({name: facts[name] for name in _PLAN})
    if not any(name in facts for name in _HELD_OUT.values()):
        return EpochPlan(train)
    _check_kinds(facts, dict.fromkeys(_HELD_OUT.values(), int))
    own = {own: facts[name] for own, name in _HELD_OUT.items()}
    return EpochPlan(train, _checked({**own, "seed": train.seed, "shuffle": False}))


def _check_kinds(facts: Mapping[str, Any], kinds: Mapping[str, type]) -> None:
    for name, kind in kinds.items():
        if type(facts.get(name)) is not kind:
            raise DataError(f"the loader says {name}={facts.get(name)!r}; both sides need the same release")


def _checked(values: dict[str, Any]) -> Plan:
    samples, size = values["samples"], values["batch_size"]
    if not 0 < samples <= MAX_SAMPLES or not 1 <= size <= samples:
        raise DataError(f"the loader has {samples} samples in batches of {size}")
    return Plan(**values)


class KeptPlan(Plan):
    """A plan that computes ids of many steps at once, and keeps them for as long as neighbours are asked for."""

    _steps: ClassVar[int]  # no fields of the plan, though each instance has its own
    _kept: ClassVar[dict[tuple[int, int], np.ndarray]]

    def __init__(self, plan: Plan) -> None:
        super().__init__(**{name: getattr(plan, name) for name in _PLAN})
        object.__setattr__(self, "_steps", max(1, min(_STEPS, _SAMPLES // plan.batch_size)))
        object.__setattr__(self, "_kept", {})

    def span(self, epoch: int, first: int, last: int) -> np.ndarray:
        """Sample ids of the steps [first, last). Any thread may ask: at worst two compute the same."""
        begin, size = first - first % self._steps, self.batch_size
        if last > begin + self._steps:
            middle = begin + self._steps
            return np.concatenate([self.span(epoch, first, middle), self.span(epoch, middle, last)])
        ids = self._kept.get((epoch, begin))
        if ids is None:
            ids = super().span(epoch, begin, min(begin + self._steps, self.steps_per_epoch))
            for old in list(self._kept)[: -(_KEPT - 1)]:
                self._kept.pop(old, None)
            self._kept[epoch, begin] = ids
        return ids[(first - begin) * size : (last - begin) * size]


class PlannedIds:
    """Ids of the steps of a feed, numbered through training and validation."""

    def __init__(self, plan: EpochPlan) -> None:
        self._plan, self._validation = KeptPlan(plan.train), plan.validation
        self._last = plan.train.steps_per_epoch

    def __call__(self, epoch: int, step: int) -> np.ndarray:
        """Ids of a whole step."""
        if step >= self._last and self._validation is not None:
            return self._validation.ids(0, step - self._last)
        return self._plan.span(epoch, step, step + 1)

    def run(self, epoch: int, first: int, steps: int) -> np.ndarray | list[np.ndarray]:
        """Ids of each of some neighbouring steps; as a matrix where all have the same number."""
        if first + steps > self._last:
            return [self(epoch, step) for step in range(first, first + steps)]
        ids, size = self._plan.span(epoch, first, first + steps), self._plan.batch_size
        if len(ids) == steps * size:
            return ids.reshape(steps, size)
        return [ids[at : at + size] for at in range(0, len(ids), size)]
