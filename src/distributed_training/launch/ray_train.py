"""What Ray Train is given: how many workers, when to start again, and what each of them runs.

Imported only where Ray is there and its second API is switched on: see `ray_cluster.connected`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.backend import Backend, BackendConfig
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from distributed_training.launch import ray_rank
from distributed_training.launch.ray_rank import Seat, Task
from distributed_training.runtime.errors import ConfigError, RanksError

if TYPE_CHECKING:
    from distributed_training.launch.ray_launch import Job

_SETTINGS = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1",  # seconds after which it is seen that a worker ended
    "RAY_TRAIN_METRICS_ENABLED": "0",
}


def make_trainer(job: Job, task: Task, bundle: dict[str, float], desk: Any, failures: int, folder: str) -> Any:
    """A trainer of Ray Train for a job; `folder` is for its own notes."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)  # Ray Train passes them on to its own processes
    workers = job.workers
    elastic = workers.fewest is not None and workers.fewest < workers.count
    number: Any = (workers.fewest, workers.count) if elastic else workers.count  # two: Ray's types know only one
    try:
        scaling = ScalingConfig(
            num_workers=number,
            use_gpu="GPU" in bundle,
            resources_per_worker=bundle or {"CPU": 0},
            placement_strategy=workers.placement,
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"Ray {ray.__version__} refuses these workers: {error}; a newer Ray may not") from None
    return DataParallelTrainer(
        _Loop(task, desk, final=job.restarts is None),
        backend_config=RanksConfig(),
        scaling_config=scaling,
        run_config=RunConfig(
            name=f"dtrain-{task.job[:12]}",
            storage_path=folder,
            failure_config=FailureConfig(max_failures=failures),
        ),
    )


class _Loop:
    """What Ray Train calls on every worker, in a thread of its own."""

    __name__ = "rank"

    def __init__(self, task: Task, desk: Any, final: bool) -> None:
        self._task, self._desk, self._final = task, desk, final

    def __call__(self) -> None:
        context, offer = get_context(), None
        if context.get_world_rank() == 0:
            offer = (*ray_rank.meeting_point(), ray.get(self._desk.open.remote(), timeout=60))
        master, port, start = broadcast_from_rank_zero(offer)
        seat = Seat(
            rank=context.get_world_rank(),
            size=context.get_world_size(),
            local_rank=context.get_local_rank(),
            local_size=context.get_local_world_size(),
            master=master,
            port=port,
            start=start,
        )
        end = ray_rank.run_rank(self._task, seat, self._desk)
        if not end.code or end.told:
            return
        ends = ray_rank.wait_for_others(seat, end, self._desk)
        if self._final and not ray_rank.only_lost(ends):
            return  # it would come again: the launcher knows, and Ray Train is to see no reason for another start
        raise RanksError(f"rank {seat.rank} of {seat.size} ended with code {end.code}")


class Ranks(Backend):
    """How Ray Train prepares workers, and how it takes leave of them."""

    share_cuda_visible_devices = True  # ranks on one node reach each other's GPUs, and LOCAL_RANK is the number of one

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        """Called before the workers go, in a failure or because there will be more or fewer: ranks save first."""
        calls = worker_group.execute_async(ray_rank.save_and_end)
        ray.wait(calls, num_returns=len(calls), timeout=ray_rank.SAVING + 15)


class RanksConfig(BackendConfig):
    """Ray Train asks it for the class above."""

    @property
    def backend_cls(self) -> type[Backend]:
        """The class."""
        return Ranks
