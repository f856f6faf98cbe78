"""Two machines with addresses of their own train the same as one process: by hand, by rendezvous, over ssh."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.forked_ranks import RankServer
from tests.launch.networks import Machine, two_machines
from tests.launching import environment, free_port

PROGRAMS = Path(__file__).parent / "programs"
DTRAIN = [sys.executable, "-m", "distributed_training"]
SETTINGS = ("training.epochs=1", "run.progress=off", "run.deadline=60", "run.root=runs")
SSH = f"{sys.executable} {PROGRAMS / 'ssh_to_namespace.py'}"


@pytest.fixture(scope="module")
def machines() -> Iterator[tuple[Machine, Machine]]:
    with two_machines() as pair:
        yield pair


@pytest.fixture(scope="module")
def alone(rank_server: RankServer, tmp_path_factory: pytest.TempPathFactory) -> float:
    """Loss of one process."""
    folder = tmp_path_factory.mktemp("alone")
    rank_server.start_alone([*DTRAIN[1:], "train", *SETTINGS], PWD=str(folder)).succeed()
    return val_loss(folder / "runs")


def val_loss(runs: Path) -> float:
    (folder,) = runs.iterdir()
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return float([event["val_loss"] for event in events if "val_loss" in event][-1])


def together(commands: list[list[str]], variables: list[dict[str, str]], folders: list[Path]) -> list[str]:
    """Run commands at the same time; what each printed. All end, whatever happens."""
    processes = []
    for command, own, folder in zip(commands, variables, folders):
        folder.mkdir(exist_ok=True)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        processes.append(subprocess.Popen(command, cwd=folder, env=environment(**own), **pipes))  # type: ignore[call-overload]
    try:
        return [process.communicate(timeout=150)[0] for process in processes]
    finally:
        for process, command in zip(processes, commands):
            process.kill()
            process.wait()
            assert process.returncode == 0, command


@pytest.mark.timeout(240)
def test_by_hand(in_tmp: Path, machines: tuple[Machine, Machine], alone: float) -> None:
    meet = {"MASTER_ADDR": machines[0].address, "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}

    together(
        [[*machine.inside, *DTRAIN, "train", "strategy=ddp", *SETTINGS] for machine in machines],
        [{**meet, "RANK": str(rank)} for rank in range(2)],
        [in_tmp / "one", in_tmp / "two"],  # no common file system
    )

    assert val_loss(in_tmp / "one" / "runs") == pytest.approx(alone, abs=1e-5)
    assert not (in_tmp / "two" / "runs").exists()


@pytest.mark.timeout(240)
def test_by_rendezvous(in_tmp: Path, machines: tuple[Machine, Machine], alone: float) -> None:
    words = ["--nnodes", "2", "--nproc", "1", "--rdzv", f"{machines[0].address}:{free_port()}", "--deadline", "60"]

    together(
        [
            [*machine.inside, *DTRAIN, "launch", *words, "--", "train", "strategy=ddp", *SETTINGS]
            for machine in machines
        ],
        [{}, {}],
        [in_tmp, in_tmp],
    )

    assert val_loss(in_tmp / "runs") == pytest.approx(alone, abs=1e-5)


@pytest.mark.timeout(240)
def test_restarts_on_two_machines(in_tmp: Path, machines: tuple[Machine, Machine], alone: float) -> None:
    """The machines' launchers see the failure at different moments, and still start the same attempt."""
    words = ["--nnodes", "2", "--nproc", "1", "--rdzv", f"{machines[0].address}:{free_port()}", "--max-restarts", "2"]
    program = [str(PROGRAMS / "failing.py"), "kill", "9", "strategy=ddp", "checkpoint.every_steps=4", *SETTINGS]

    said = together(
        [[*machine.inside, *DTRAIN, "launch", *words, "--", *program] for machine in machines],
        [{}, {}],
        [in_tmp, in_tmp],
    )

    assert "all ranks start again" in said[0] + said[1]
    assert val_loss(in_tmp / "runs") == pytest.approx(alone, abs=1e-5)


@pytest.mark.timeout(240)
def test_a_machine_that_comes_later_joins(in_tmp: Path, machines: tuple[Machine, Machine]) -> None:
    """All ranks save, start again in the larger world, and go on."""
    words = ["--nnodes", "1:2", "--nproc", "1", "--rdzv", f"{machines[0].address}:{free_port()}"]
    command = [*DTRAIN, "launch", *words, "--", "train", "strategy=ddp", "training.epochs=100000", "run.name=grown"]
    settings: dict[str, Any] = {"stderr": subprocess.STDOUT, "text": True, "env": environment()}
    with subprocess.Popen([*machines[0].inside, *command], stdout=subprocess.PIPE, **settings) as one:
        assert one.stdout is not None
        next(line for line in one.stdout if "epoch 2/" in line)
        with subprocess.Popen([*machines[1].inside, *command], stdout=subprocess.DEVNULL, **settings) as two:
            next(line for line in one.stdout if "another machine came" in line)
            next(line for line in one.stdout if "epoch" in line)
            one.send_signal(signal.SIGINT)
            one.communicate(timeout=60)
            two.send_signal(signal.SIGINT)
    assert one.returncode == 130
    events = [json.loads(line) for line in Path("runs/grown/events.jsonl").read_text().splitlines()]
    resumed = [event["resumed_from"] for event in events if event["event"] == "start"]
    assert resumed[0] is None
    assert resumed[1] > 0


@pytest.mark.timeout(240)
def test_over_ssh(in_tmp: Path, machines: tuple[Machine, Machine], alone: float) -> None:
    """Everything but ssh itself, which test_ssh.py has: two hosts, environment, prefixes, order of the last words."""
    hosts = ",".join(machine.name for machine in machines)
    words = ["--hosts", hosts, "--nproc", "1", "--ssh", SSH, "--env", "OF_MINE"]
    train = [*DTRAIN, "launch", *words, "--", "train", "strategy=ddp", *SETTINGS[1:]]

    own = {"DTRAIN_TRAINING__EPOCHS": "1", "OF_MINE": "it's $HOME; a `secret`"}
    (said,) = together([train], [own], [in_tmp])

    assert val_loss(in_tmp / "runs") == pytest.approx(alone, abs=1e-5)
    assert f"[{machines[0].name}] Training completed" in said

    failing = [*DTRAIN, "launch", *words, "--", str(PROGRAMS / "failing.py"), "raise", "5", "strategy=ddp", *SETTINGS]
    done = subprocess.run(failing, capture_output=True, text=True, timeout=120, env=environment(**own))
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"[{machines[1].name}] rank 1 of 2 (")
    assert last.endswith("failed: ValueError: bad luck")

    unreachable = [*DTRAIN, "launch", "--hosts", f"{machines[0].name},nowhere", "--ssh", SSH, "--", "train"]
    done = subprocess.run(unreachable, capture_output=True, text=True, timeout=120, env=environment())
    assert done.returncode == 255
    assert done.stderr.strip().splitlines()[-1].startswith("[nowhere] cannot be reached over ssh")


@pytest.mark.timeout(120)
def test_remote_ranks_end_with_the_local_launcher(in_tmp: Path, machines: tuple[Machine, Machine]) -> None:
    hosts = ",".join(machine.name for machine in machines)
    command = [*DTRAIN, "launch", "--hosts", hosts, "--nproc", "1", "--ssh", SSH, "--", str(PROGRAMS / "sleeping.py")]
    with subprocess.Popen(command, env=environment(TMPDIR=str(in_tmp)), stdout=subprocess.DEVNULL) as process:
        files = [in_tmp / f"rank-{rank}.json" for rank in range(2)]
        end = time.monotonic() + 60
        while not all(file.exists() for file in files):
            assert time.monotonic() < end, "the ranks did not start"
            time.sleep(0.05)
        pids = [json.loads(file.read_text())["pid"] for file in files]
        process.send_signal(signal.SIGKILL)
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end, "the ranks outlived their launcher"
        time.sleep(0.05)
