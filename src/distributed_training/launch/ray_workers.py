"""The ranks of one training on Ray's workers, without Ray Train: for what Ray has placed already, such as a trial."""

from __future__ import annotations

import signal
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed_training.config.errors import ConfigError
from distributed_training.launch.ray_account import Account, Show, on_screen
from distributed_training.launch.ray_desk import End, open_desk
from distributed_training.launch.ray_rank import SAVING, Seat, Task, meeting_point, run_rank, wait_for_others
from distributed_training.launch.report import Outcome
from distributed_training.runtime.errors import RanksError

_INTERVAL = 0.1  # seconds
_FOLLOW = 10.0  # seconds in which ranks end after one of them has failed


def run_ranks(
    program: Sequence[str],
    workers: int,
    *,
    resources: Mapping[str, float] | None = None,
    placement_group: Any = None,
    first_bundle: int = 0,
    variables: Mapping[str, str] | None = None,
    directory: str | Path | None = None,
    job: str | None = None,
    start: int = 0,
    wish: Callable[[], signal.Signals | None] = lambda: None,
    show: Show = on_screen,
    deadline: float = 300.0,
) -> Outcome:
    """Run `python PROGRAM...` in `workers` ranks, each on a Ray worker of its own, and say how they ended.

        outcome = run_ranks(["-m", "distributed_training", "train", "trial.yaml"], 4, resources={"CPU": 1, "GPU": 1})

    A failure of one rank ends all. Nothing is restarted here: the same call with the same `job` and the next `start`
    goes on from the newest good checkpoint of the run.

    Args:
        program: arguments of Python: `-m module ...` or `script.py ...`.
        workers: number of ranks.
        resources: what each rank's worker takes; left out, one CPU.
        placement_group: where they run, rank n in the bundle `first_bundle` + n; left out, in a group made for them.
        variables: environment variables of the ranks.
        directory: their working directory; left out, that of this process.
        job: name of the job; a run directory belongs to one job.
        start: how often the job was started before.
        wish: asked a few times a second, in this thread: a signal makes all ranks save and end.
        show: gets what the ranks write.
        deadline: longest wait in seconds for the workers to be placed.

    Raises:
        RanksError: the workers could not be placed in time.
    """
    if workers < 1:
        raise ConfigError(f"run_ranks(workers={workers}): at least one")
    import ray
    from ray.util.placement_group import placement_group as make_group
    from ray.util.placement_group import remove_placement_group

    bundle = {"CPU": 1.0, **(resources or {})}
    own = None
    if placement_group is None:
        placement_group, first_bundle = (own := make_group([bundle] * workers, strategy="PACK")), 0
    desk = open_desk()
    seats: list[Any] = []
    try:
        seats = _place(workers, bundle, placement_group, first_bundle, deadline)
        task = Task(list(program), str(directory or Path.cwd()), job or uuid.uuid4().hex, dict(variables or {}))
        return _follow(seats, task, start, desk, wish, show)
    finally:
        for actor in (*seats, desk):
            ray.kill(actor)
        if own is not None:
            remove_placement_group(own)


class _Worker:
    """The actor around one rank."""

    def where(self) -> tuple[str, list[str], str, int]:
        """(node, GPUs, address, free port)."""
        import ray

        gpus = [str(number) for number in ray.get_gpu_ids()]
        return (ray.get_runtime_context().get_node_id(), gpus, *meeting_point())

    def run(self, task: Task, seat: Seat, desk: Any) -> End:
        """The rank, to its end."""
        end = run_rank(task, seat, desk)
        if end.code:
            wait_for_others(seat, end, desk)
        return end


def _place(workers: int, bundle: Mapping[str, float], group: Any, first: int, deadline: float) -> list[Any]:
    import ray
    from ray.exceptions import GetTimeoutError
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    others = {name: value for name, value in bundle.items() if name not in ("CPU", "GPU")}
    try:
        ray.get(group.ready(), timeout=deadline)
    except GetTimeoutError:
        asked = ", ".join(f"{value:g} {name}" for name, value in bundle.items())
        raise RanksError(
            f"after {deadline:g} s the Ray cluster had no room for {workers} workers of {asked} each; "
            "`ray status` shows who uses it; ask for fewer or smaller workers, or add nodes"
        ) from None
    return [
        ray.remote(_Worker)
        .options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            resources=others or None,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=first + number),
        )
        .remote()
        for number in range(workers)
    ]


def _follow(
    workers: list[Any], task: Task, start: int, desk: Any, wish: Callable[[], signal.Signals | None], show: Show
) -> Outcome:
    import ray
    from ray.exceptions import RayError

    places = ray.get([worker.where.remote() for worker in workers], timeout=300)
    calls = [worker.run.remote(task, seat, desk) for worker, seat in zip(workers, _seats(places, start))]
    account, told, limit = Account(desk, show), None, float("inf")
    open_ = list(calls)
    while open_ and time.monotonic() < limit:
        done, open_ = ray.wait(open_, num_returns=len(open_), timeout=_INTERVAL)
        account.read()
        asked = wish()
        if asked is not None and told is None:
            told, limit = asked, time.monotonic() + SAVING + _FOLLOW
            ray.get(desk.order.remote(asked.name), timeout=30)
        for call in done:
            try:
                failed = ray.get(call).code != 0
            except RayError:  # the worker is gone; the account knows which rank it had
                failed = True
            if failed and told is None:
                limit = min(limit, time.monotonic() + _FOLLOW)
    account.read_to_the_end()
    outcome = account.outcome()
    return Outcome(128 + told, outcome.report) if told is not None and not account.finished else outcome


def _seats(places: list[tuple[str, list[str], str, int]], start: int) -> list[Seat]:
    """Ranks in the order of the workers; those of one node see the same GPUs, so that these can reach each other."""
    nodes = [place[0] for place in places]
    _, _, master, port = places[0]
    seats = []
    for number, node in enumerate(nodes):
        gpus = [gpu for place in places if place[0] == node for gpu in place[1]]
        whole = tuple(gpus) if len(set(gpus)) == len(gpus) else ()  # parts of one GPU: each keeps what Ray gave it
        here = nodes[:number].count(node)
        seats.append(Seat(number, len(places), here, nodes.count(node), master, port, start, whole))
    return seats
