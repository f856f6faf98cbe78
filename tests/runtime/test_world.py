"""The environment of every launcher says which rank of how many a process is."""

from __future__ import annotations

from typing import Any

import pytest

from distributed_training.runtime.errors import ConfigError
from distributed_training.runtime.world import World, first_host, named, read_world

HAND = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
LEFTOVER = {"RANK": "0", "WORLD_SIZE": "1"}
TORCHRUN = {
    **HAND,
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "3",
}
HOROVOD = {
    "HOROVOD_RANK": "2",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "0",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.9",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[03-05,09]",
    "SLURM_JOB_ID": "20001",
    "SLURM_RESTART_COUNT": "1",
}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        pytest.param({}, {"launcher": "none", "rank": 0, "size": 1, "master": None}, id="none"),
        pytest.param(
            HAND,
            {"launcher": "hand", "rank": 1, "size": 4, "local_rank": 0, "master": "10.0.0.1", "port": 1234}
            | {"hosted": False, "attempt": 0},
            id="by hand",
        ),
        pytest.param({**HAND, "MASTER_PORT": ""}, {"port": 29500}, id="by hand, usual port"),
        pytest.param(
            TORCHRUN,
            {
                "launcher": "torchrun",
                "rank": 1,
                "size": 4,
                "local_rank": 1,
                "local_size": 2,
                "hosted": True,
                "attempt": 3,
            },
            id="torchrun",
        ),
        pytest.param({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"}, {"hosted": False}, id="torchrun, no store"),
        pytest.param({**TORCHRUN, "ACCELERATE_MIXED_PRECISION": "no"}, {"launcher": "accelerate"}, id="accelerate"),
        pytest.param(
            {"ACCELERATE_MIXED_PRECISION": "no"}, {"launcher": "accelerate", "size": 1}, id="accelerate, one process"
        ),
        pytest.param(
            HOROVOD,
            {"launcher": "horovodrun", "rank": 2, "size": 4, "local_rank": 0, "local_size": 2, "master": "10.0.0.9"},
            id="horovodrun",
        ),
        pytest.param(
            OPEN_MPI,
            {"launcher": "mpirun", "rank": 1, "size": 2, "local_rank": 1, "local_size": 2, "master": "127.0.0.1"},
            id="Open MPI, one machine",
        ),
        pytest.param(
            {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "MASTER_ADDR": "a"}, {"master": "a"}, id="Open MPI, two"
        ),
        pytest.param(
            HYDRA,
            {"launcher": "mpirun", "rank": 1, "size": 2, "local_rank": 1, "local_size": 2, "master": "127.0.0.1"},
            id="MPICH",
        ),
        pytest.param(
            SLURM,
            {"launcher": "slurm", "rank": 5, "size": 7, "local_rank": 1, "local_size": 2, "master": "gpu03"}
            | {"port": 15001, "attempt": 1},
            id="Slurm",
        ),
        pytest.param({**SLURM, "SLURM_NODEID": "3"}, {"local_size": 1}, id="Slurm, the last and smaller node"),
        pytest.param(
            {**SLURM, "MASTER_ADDR": "a", "MASTER_PORT": "7"}, {"master": "a", "port": 7}, id="Slurm, own place"
        ),
    ],
)
def test_each_launcher(variables: dict[str, str], expected: dict[str, Any]) -> None:
    world = read_world(variables)
    assert {name: getattr(world, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("variables", "launcher", "size"),
    [
        pytest.param({**SLURM, **TORCHRUN}, "torchrun", 4, id="torchrun in a Slurm job"),
        pytest.param({**OPEN_MPI, **TORCHRUN}, "torchrun", 4, id="torchrun under mpirun"),
        pytest.param({**SLURM, **TORCHRUN, **LEFTOVER}, "torchrun", 1, id="one process of torchrun in a Slurm job"),
        pytest.param({**SLURM, **OPEN_MPI}, "mpirun", 2, id="mpirun in a Slurm job"),
        pytest.param({**OPEN_MPI, **HOROVOD}, "horovodrun", 4, id="horovodrun over MPI"),
        pytest.param({**HYDRA, **SLURM}, "slurm", 7, id="srun with PMI"),
        pytest.param({**HAND, **SLURM}, "hand", 4, id="by hand in a Slurm job"),
        pytest.param({**LEFTOVER}, "hand", 1, id="a container's leftover"),
        pytest.param({"WORLD_SIZE": "1"}, "hand", 1, id="half a leftover"),
        pytest.param({"WORLD_SIZE": "", "RANK": ""}, "none", 1, id="empty values"),
        pytest.param({**LEFTOVER, **OPEN_MPI}, "mpirun", 2, id="mpirun in a container with a leftover"),
        pytest.param({**LEFTOVER, **SLURM}, "slurm", 7, id="srun in a container with a leftover"),
        pytest.param({k: v for k, v in SLURM.items() if "STEP" not in k}, "none", 1, id="a batch script outside srun"),
    ],
)
def test_who_counts_where_several_speak(variables: dict[str, str], launcher: str, size: int) -> None:
    world = read_world(variables)
    assert (world.launcher, world.size) == (launcher, size)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0"}, "RANK is set in the environment, but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set in the environment, but RANK is not"),
        ({**HAND, "RANK": "4"}, "rank 4 in a world of 4: ranks go from 0 to 3"),
        ({**HAND, "RANK": "-1"}, "rank -1"),
        ({**HAND, "WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        ({**HAND, "RANK": "one"}, "RANK='one' in the environment is no whole number"),
        ({**HAND, "MASTER_PORT": "70000"}, "MASTER_PORT=70000 is no port"),
        (
            {**HAND, "MASTER_ADDR": ""},
            "rank 1 of 4, started by hand, does not know where the ranks meet: set MASTER_ADDR",
        ),
        (
            {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0"},
            "SLURM_PROCID is set in the environment, but SLURM_NTASKS is not",
        ),
    ],
)
def test_bad_values_are_refused_by_name(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_world(variables)
    assert message in str(error.value)


def test_ranks_of_mpirun_on_several_machines_can_be_told_where_to_meet_later() -> None:
    world = read_world({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"})
    assert (world.launcher, world.master) == ("mpirun", None)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu1", "gpu1"),
        ("a,b", "a"),
        ("gpu[03-05,09],cpu1", "gpu03"),
        ("gpu[7]", "gpu7"),
        ("rack[1-2]node[3,5]", "rack1node3"),
        ("node[1-2]-ib,x", "node1-ib"),
        ("n-01.cluster.org", "n-01.cluster.org"),
    ],
)
def test_the_first_machine_of_a_node_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_a_node_list_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="no list of nodes"):
        first_host(",")


def test_words_for_messages() -> None:
    assert World(rank=1, size=4).label == "rank 1 of 4"
    assert named(["1"]) == "rank 1"
    assert named(["1", "2"]) == "ranks 1, 2"
    assert named([str(n) for n in range(20)]) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and more"
