"""Which rank of how many this process is: the environment of every launcher, read in this one place."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from distributed_training.runtime.errors import ConfigError

DEFAULT_PORT = 29500
JOB_VARIABLE = "LAUNCHED_JOB"
"""Set by `dtrain launch`: a name of the job that all its restarts share."""
# Launchers with a library through which ranks can tell each other where they meet, and what to choose for it.
_CAN_TELL = {"horovodrun": "", "mpirun": "; or use strategy=mpi (strategy.backend=mpi), which needs no such address"}
_SLURM_PORTS = (15000, 20000)  # first, and how many: jobs that share a machine rarely meet


@dataclass(frozen=True)
class World:
    """This process among the processes of its job."""

    rank: int = 0
    """Number of this process in the job, from 0."""
    size: int = 1
    """How many processes there are."""
    local_rank: int = 0
    """Number of this process on its machine: the number of its GPU."""
    local_size: int = 1
    """How many processes of the job this machine has."""
    master: str | None = None
    """Address at which all ranks meet."""
    port: int = DEFAULT_PORT
    """Port at which all ranks meet."""
    launcher: str = "none"
    """Who started the processes: torchrun, accelerate, horovodrun, mpirun, slurm, hand, or none."""
    hosted: bool = False
    """Whether the launcher keeps the meeting point itself, so that rank 0 must not open it."""
    attempt: int = 0
    """How often the launcher has restarted the job."""
    job: str | None = None
    """What the launcher calls the job, where no other job is ever called the same."""

    @property
    def label(self) -> str:
        """For messages: `rank 1 of 4`."""
        return f"rank {self.rank} of {self.size}"


def named(ranks: list[str]) -> str:
    """For messages: `ranks 1, 2`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks[:8])}{' and more' if len(ranks) > 8 else ''}"


def read_world(environment: Mapping[str, str] | None = None) -> World:
    """The world that the launcher described in the environment; one process alone if none did."""
    given = os.environ if environment is None else environment
    variables = {name: value for name, value in given.items() if value.strip()}  # containers set empty ones
    for found, reader in _LAUNCHERS:
        if found(variables):
            return _checked(reader(variables))
    return World()


def _torchrun(v: Mapping[str, str]) -> World:
    launcher = "accelerate" if "ACCELERATE_MIXED_PRECISION" in v else "torchrun"
    if "TORCHELASTIC_RUN_ID" not in v and launcher == "torchrun":
        launcher = "hand"
    size = _number(v, "WORLD_SIZE", "RANK")
    # Set by hand, one process a machine is the usual case, and then LOCAL_RANK is left out.
    return World(
        rank=_number(v, "RANK", "WORLD_SIZE", default=0 if size == 1 else None),
        size=size,
        local_rank=_number(v, "LOCAL_RANK", default=0),
        local_size=_number(v, "LOCAL_WORLD_SIZE", default=1),
        master=v.get("MASTER_ADDR"),
        port=_number(v, "MASTER_PORT", default=DEFAULT_PORT),
        launcher=launcher,
        hosted=v.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True",
        attempt=_number(v, "TORCHELASTIC_RESTART_COUNT", default=0),
        job=v.get(JOB_VARIABLE),
    )


def _horovod(v: Mapping[str, str]) -> World:
    return World(
        rank=_number(v, "HOROVOD_RANK", "HOROVOD_SIZE"),
        size=_number(v, "HOROVOD_SIZE", "HOROVOD_RANK"),
        local_rank=_number(v, "HOROVOD_LOCAL_RANK", default=0),
        local_size=_number(v, "HOROVOD_LOCAL_SIZE", default=1),
        master=v.get("MASTER_ADDR", v.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")),
        port=_number(v, "MASTER_PORT", default=DEFAULT_PORT),
        launcher="horovodrun",
    )


def _mpirun(rank: str, size: str, local_rank: str, local_size: str) -> Callable[[Mapping[str, str]], World]:
    """The reader of an MPI's variables, which have other names in each."""

    def read(v: Mapping[str, str]) -> World:
        ranks, here = _number(v, size, rank), _number(v, local_size, default=1)
        return World(
            rank=_number(v, rank, size),
            size=ranks,
            local_rank=_number(v, local_rank, default=0),
            local_size=here,
            master=v.get("MASTER_ADDR", "127.0.0.1" if here == ranks else None),
            port=_number(v, "MASTER_PORT", default=DEFAULT_PORT),
            launcher="mpirun",
        )

    return read


_open_mpi = _mpirun(
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
)
_mpich = _mpirun("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def _slurm(v: Mapping[str, str]) -> World:
    first, count = _SLURM_PORTS
    nodes = v.get("SLURM_STEP_NODELIST", v.get("SLURM_JOB_NODELIST", ""))
    job = _number(v, "SLURM_JOB_ID", default=0)
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in v else "SLURM_NTASKS"
    by_node = _tasks_by_node(v.get("SLURM_STEP_TASKS_PER_NODE", v.get("SLURM_NTASKS_PER_NODE", "1")))
    return World(
        rank=_number(v, "SLURM_PROCID", tasks),
        size=_number(v, tasks, "SLURM_PROCID"),
        local_rank=_number(v, "SLURM_LOCALID", default=0),
        local_size=by_node[min(_number(v, "SLURM_NODEID", default=0), len(by_node) - 1)],
        master=v.get("MASTER_ADDR", first_host(nodes) if nodes else None),
        port=_number(v, "MASTER_PORT", default=first + job % count),
        launcher="slurm",
        attempt=_number(v, "SLURM_RESTART_COUNT", default=0),
        job=f"slurm-{v.get('SLURM_CLUSTER_NAME', '')}-{job}" if job else None,
    )


_Found = Callable[[Mapping[str, str]], bool]
# The first that fits: torchrun started inside a Slurm job is torchrun; a batch script outside srun is one process.
_LAUNCHERS: list[tuple[_Found, Callable[[Mapping[str, str]], World]]] = [
    (lambda v: "HOROVOD_RANK" in v, _horovod),
    (lambda v: "TORCHELASTIC_RUN_ID" in v or ("RANK" in v and v.get("WORLD_SIZE") != "1"), _torchrun),
    (lambda v: "OMPI_COMM_WORLD_RANK" in v, _open_mpi),
    (lambda v: "SLURM_PROCID" in v and "SLURM_STEP_ID" in v, _slurm),
    (lambda v: "PMI_RANK" in v, _mpich),
    (lambda v: "WORLD_SIZE" in v, _torchrun),  # containers set it to 1, whatever is started in them
    # Last: started under one of those above, it only says how they are to be used.
    (lambda v: "ACCELERATE_MIXED_PRECISION" in v, lambda v: World(launcher="accelerate")),
]


def first_host(nodes: str) -> str:
    """The first machine of a Slurm node list: `gpu[03-05,09],cpu1` begins with gpu03."""
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)  # up to a comma outside of brackets
    if match is None:
        raise ConfigError(f"SLURM_JOB_NODELIST={nodes!r} is no list of nodes")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", match.group())


def _checked(world: World) -> World:
    if world.size < 1:
        raise ConfigError(f"{world.launcher} gave WORLD_SIZE={world.size}: a job has at least one rank")
    if not 0 <= world.rank < world.size:
        raise ConfigError(
            f"{world.launcher} gave rank {world.rank} in a world of {world.size}: ranks go from 0 to {world.size - 1}"
        )
    if not 1 <= world.port <= 65535:
        raise ConfigError(f"MASTER_PORT={world.port} is no port: give one from 1 to 65535")
    if world.size > 1 and world.master is None and world.launcher not in _CAN_TELL:
        raise nowhere_to_meet(world)
    return world


def nowhere_to_meet(world: World) -> ConfigError:
    """The error for ranks that need a meeting point and were given none."""
    return ConfigError(
        f"{world.label}, started by {world.launcher}, does not know where the ranks meet: "
        "set MASTER_ADDR to the address of rank 0's machine, the same on all machines"
        f"{_CAN_TELL.get(world.launcher, '')}"
    )


def _number(variables: Mapping[str, str], name: str, beside: str | None = None, default: int | None = None) -> int:
    text = variables.get(name)
    if text is None:
        if default is not None:
            return default
        raise ConfigError(f"{beside} is set in the environment, but {name} is not: set both or neither")
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} in the environment is no whole number") from None


def _tasks_by_node(text: str) -> list[int]:
    """Slurm writes `2(x3),1`: two tasks on each of three nodes, then one."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, nodes in found for _ in range(int(nodes or 1))] or [1]
