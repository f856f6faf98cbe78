"""Whether a peer that knows the token may take part: same data, same plan, same settings."""

from __future__ import annotations

from dataclasses import dataclass, field

from distributed_training.wire.errors import Reason
from distributed_training.wire.fields import Fact
from distributed_training.wire.messages import Join, Refused


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What the server needs a worker to have."""

    dataset: str | None = None
    """Fingerprint of the dataset; None where the server does not know it (a client brings its own)."""
    plan: int | None = None
    facts: dict[str, Fact] = field(default_factory=dict)


def refusal(join: Join, expected: Expected) -> Refused | None:
    """Why this peer cannot take part; None where it can."""
    if expected.plan is not None and join.plan != expected.plan:
        return Refused(
            Reason.PLAN,
            f"{join.name} computes the sample plan of version {join.plan}, the server that of version {expected.plan}; "
            "install the same release on both sides",
        )
    if expected.dataset is not None and join.dataset != expected.dataset:
        return Refused(
            Reason.DATASET,
            f"{join.name} has a dataset with fingerprint {join.dataset[:80]}, this run is about "
            f"{expected.dataset[:80]}; give it the same files and the same data settings",
        )
    for name, value in expected.facts.items():
        if name not in join.facts or join.facts[name] != value or type(join.facts[name]) is not type(value):
            there = repr(join.facts[name]) if name in join.facts else "not set"
            return Refused(
                Reason.CONFIG,
                f"{name} is {value!r} on the server and {there} on {join.name}; give both the same config",
            )
    return None
