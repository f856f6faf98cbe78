"""A Ray cluster: connecting to it, and whether it can hold what is asked."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from distributed_training.launch.ray_address import is_started_here, knock, started_here
from distributed_training.runtime.environment import environment_for_a_while
from distributed_training.runtime.errors import RanksError
from distributed_training.runtime.imports import require

DEADLINE = 30.0
"""Seconds in which a cluster has to answer."""
_POLL = 1.0  # seconds
_OBJECTS = 100 << 20  # bytes of shared memory for a cluster of our own: nothing of ours travels through it


@dataclass(frozen=True)
class Node:
    """A machine of the cluster."""

    id: str
    address: str
    resources: Mapping[str, float]

    def holds(self, bundle: Mapping[str, float]) -> int:
        """How many workers of this size it has room for when nobody else uses it."""
        wanted = {name: size for name, size in bundle.items() if size > 0}
        if not wanted:
            return 1_000_000
        return min(int(self.resources.get(name, 0) / size + 1e-9) for name, size in wanted.items())

    def __str__(self) -> str:
        return f"{self.address}: {amounts(self.resources)}"


@contextmanager
def connected(address: str | None = None, deadline: float = DEADLINE, cpus: float | None = None) -> Iterator[Any]:
    """The module `ray`, connected. A connection that is already there is used, and stays.

    Args:
        address: `auto`, `HOST:PORT` or `ray://HOST:PORT`; `local` starts one here for as long as this lasts; left out,
            RAY_ADDRESS, or the cluster that `ray start` made on this machine, or else a local one.
        deadline: longest wait for an answer, in seconds.
        cpus: of a cluster started here; left out, the cores of this machine.
    """
    with environment_for_a_while(**_quiet()):
        ray = require("ray", "ray", "a Ray cluster")
        if ray.is_initialized():
            yield ray
            return
        _connect(ray, address, deadline, cpus)
        try:
            yield ray
        finally:
            ray.shutdown()


def _quiet() -> dict[str, str]:
    """Variables for Ray, unless the user has chosen."""
    wishes = {
        "RAY_TRAIN_V2_ENABLED": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    return {name: value for name, value in wishes.items() if name not in os.environ}


def _connect(ray: Any, address: str | None, deadline: float, cpus: float | None) -> None:
    known = address or os.environ.get("RAY_ADDRESS")
    if known and known not in ("auto", "local"):
        knock(known, deadline)
    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if path := os.environ.get("PYTHONPATH"):  # what can be imported here is to be found by the workers
        settings["runtime_env"] = {"env_vars": {"PYTHONPATH": path}}
    try:
        if known == "local" or (known is None and started_here() is None):
            ray.init(address="local", num_cpus=cpus, include_dashboard=False, object_store_memory=_OBJECTS, **settings)
        else:
            ray.init(address="auto" if known is None or is_started_here(known) else known, **settings)
    except (ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
        place = known or "this machine"
        raise RanksError(
            f"no Ray cluster at {place} that this process can join ({_first_line(error)}). Start one with "
            "`ray start --head`, give its address (--address HOST:PORT), and run this on a machine of the cluster, or "
            "send it there with `ray job submit`. One that asks for a token (as those of Ray 2.60 do) gives it to "
            "another machine only with RAY_AUTH_MODE=token set here (docs/ray.md)"
        ) from None


def nodes(ray: Any) -> list[Node]:
    """The machines of the cluster that are alive, in the order of their addresses."""
    found = [
        Node(node["NodeID"], node["NodeManagerAddress"], {k: float(v) for k, v in node["Resources"].items()})
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(found, key=lambda node: (node.address, node.id))


def check_room(
    ray: Any,
    workers: int,
    bundle: Mapping[str, float],
    *,
    each_on_its_own: bool = False,
    together: bool = False,
    wait: float = 0.0,
    advice: str = "ask for fewer or smaller ones, or add nodes",
) -> None:
    """Refuse what the cluster could not hold even if nobody else used it.

    Args:
        ray: the module, connected.
        workers: how many.
        bundle: what each takes, such as {"CPU": 1, "GPU": 1}.
        each_on_its_own: no two of them on one node.
        together: all on one node.
        wait: seconds in which nodes may still come: an autoscaler is told what is wanted.
        advice: how this user can ask for less.

    Raises:
        RanksError: with what there is, and what was asked for.
    """
    end = time.monotonic() + wait
    if wait > 0:
        from ray.autoscaler.sdk import request_resources

        with suppress(Exception):  # no autoscaler: nodes may come all the same
            request_resources(bundles=[dict(bundle)] * workers)
    while True:
        there = nodes(ray)
        rooms = [min(node.holds(bundle), 1) if each_on_its_own else node.holds(bundle) for node in there] or [0]
        room = max(rooms) if together else sum(rooms)
        if room >= workers:
            return
        if time.monotonic() >= end:
            break
        time.sleep(_POLL)
    spread = ", each on a node of its own" if each_on_its_own else ", all on one node" if together else ""
    raise RanksError(
        f"the Ray cluster cannot hold {workers} worker{'s' if workers > 1 else ''} of {amounts(bundle)} each{spread}: "
        f"it has room for {room} on {len(there)} node{'s' if len(there) > 1 else ''} ({_listed(there)}); {advice}"
    )


def amounts(resources: Mapping[str, float]) -> str:
    """For messages: `4 CPU, 1 GPU`, without what Ray adds for itself."""
    own = {name: size for name, size in resources.items() if not name.startswith(("node:", "memory", "object_store"))}
    return ", ".join(f"{size:g} {name}" for name, size in sorted(own.items()) if size > 0) or "nothing"


def _listed(found: Sequence[Node]) -> str:
    more = f"; and {len(found) - 8} more" if len(found) > 8 else ""
    return "; ".join(map(str, found[:8])) + more


def _first_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
