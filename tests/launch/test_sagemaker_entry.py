"""The container's side of a SageMaker job, run here: packed source, ranks on two machines, SIGTERM, a new start."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.launch.networks import Machine, two_machines
from tests.launching import environment

from distributed_training.config import Config, ConfigError
from distributed_training.config.sagemaker_container import read_container
from distributed_training.launch.sagemaker.entry import launch_in
from distributed_training.launch.sagemaker.packing import find_source, write_archive
from distributed_training.launch.sagemaker.starting import requirements
from distributed_training.runtime.run_directory import RunDirectory
from distributed_training.training.job import build_job
from distributed_training.verify.audit import audit

SETTINGS = {
    "training": {"epochs": 4, "batch_size": 128, "device": "cpu"},
    "data": {"preprocess": "mine:slowly"},
    "checkpoint": {"every_steps": 5},
    "run": {"progress": "off", "name": "trained"},
}
MINE = """import os, time


def slowly(sample):
    time.sleep(float(os.environ.get("SLOWLY", "0")))
    return sample
"""


class Host:
    """A machine of the job: a folder in place of /opt/ml, with what SageMaker puts there."""

    def __init__(self, base: Path, archive: Path, hosts: list[str], number: int, parameters: dict[str, str]) -> None:
        self.base, self.code = base, archive.parent / "code"
        config = base / "input" / "config"
        config.mkdir(parents=True)
        resources = {"current_host": hosts[number], "hosts": hosts, "network_interface_name": "eth0"}
        for name, content in (("resourceconfig", resources), ("hyperparameters", parameters), ("inputdataconfig", {})):
            (config / f"{name}.json").write_text(json.dumps(content))
        if not self.code.exists():  # all machines have the same one
            with tarfile.open(archive) as tar:
                tar.extractall(self.code, filter="data")

    def command(self, first: bool) -> list[str]:
        """The container's own script, or right away the Python that it becomes."""
        return (
            ["bash", ".dtrain/start.sh"]
            if first
            else [sys.executable, "-m", "distributed_training.launch.sagemaker.entry"]
        )

    def variables(self, **more: str) -> dict[str, str]:
        path = f"{self.code / '.dtrain'}:{self.code}"
        programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        own = {"SAGEMAKER_BASE_DIR": str(self.base), "TRAINING_JOB_NAME": "job-1", "TMPDIR": str(self.base)}
        return environment(**own, PYTHONPATH=path, PATH=programs, **more)

    @property
    def run(self) -> Path:
        return self.base / "checkpoints" / "trained"


@pytest.fixture
def archive(in_tmp: Path) -> Path:
    """The packed source of a project."""
    project = in_tmp / "project"
    project.mkdir()
    (project / "mine.py").write_text(MINE)
    Config.from_dict(SETTINGS).save(project / "config.yaml")
    source = find_source(project, requirements([]), (), project / "runs", 10)
    write_archive(source, in_tmp / "source.tar.gz")
    return in_tmp / "source.tar.gz"


@contextmanager
def started(machines: tuple[Machine, ...], hosts: list[Host], first: bool, **more: str) -> Iterator[list[Any]]:
    with ExitStack() as stack:
        processes = []
        for number, (machine, host) in enumerate(zip(machines, hosts)):
            command = [*machine.inside, *host.command(first and number == 0)]
            log = stack.enter_context((host.base / "log").open("w"))
            options: dict[str, Any] = {"cwd": host.code, "env": host.variables(**more), "stdout": log, "stderr": log}
            processes.append(stack.enter_context(subprocess.Popen(command, **options)))
        try:
            yield processes
        finally:
            for process in processes:
                process.terminate()


def ended(processes: list[Any], hosts: list[Host]) -> list[int]:
    codes = [process.wait(150) for process in processes]
    for host, code in zip(hosts, codes):
        if code not in (0, 143):
            raise AssertionError((host.base / "log").read_text()[-4000:])
    return codes


@pytest.mark.timeout(420)
def test_two_machines_are_interrupted_and_go_on_to_the_same_model(in_tmp: Path, archive: Path) -> None:
    program = ["-m", "distributed_training", "train", "config.yaml"]
    parameters = {"dtrain_program": json.dumps(program), "dtrain_nproc": "1", "strategy": "ddp", "training.lr": "0.003"}
    with two_machines() as machines:
        names = [machine.address for machine in machines]
        hosts = [Host(in_tmp / f"first-{n}", archive, names, n, parameters) for n in range(2)]
        with started(machines, hosts, first=True, SLOWLY="0.001") as processes:
            end = time.monotonic() + 120
            while not list(hosts[0].run.glob("checkpoints/step-*")):
                assert all(process.poll() is None for process in processes), _logs(hosts)
                assert time.monotonic() < end, _logs(hosts)
                time.sleep(0.05)
            for process in processes:  # as SageMaker does before it takes spot machines away
                process.send_signal(signal.SIGTERM)
            assert ended(processes, hosts) == [143, 143], _logs(hosts)

        saved = hosts[0].base / "checkpoints"
        again = [Host(in_tmp / f"second-{n}", archive, names, n, parameters) for n in range(2)]
        for host in again:  # new machines, to which SageMaker brings what it had copied to S3
            shutil.copytree(saved, host.base / "checkpoints")
        with started(machines, again, first=False) as processes:
            assert ended(processes, again) == [0, 0], _logs(again)

    model = again[0].base / "model"
    assert not audit(RunDirectory(model)).problem  # every sample once an epoch, over both starts
    assert len(list((again[0].base / "checkpoints").glob("*/config.yaml"))) == 1
    assert not (again[1].base / "model").exists()
    config = Config.from_dict(SETTINGS).replace(**{"training.lr": 0.003, "run.root": str(in_tmp / "here")})
    os.chdir(in_tmp / "project")
    with build_job(config) as job:
        job.train()
        expected = job.trainer.model.state_dict()
    weights = load_file(model / "model.safetensors")
    assert weights.keys() == expected.keys()
    # The best checkpoint is the last one here: the loss falls in every epoch of this training.
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)


def _logs(hosts: list[Host]) -> str:
    return "\n".join(host.base.joinpath("log").read_text()[-3000:] for host in hosts)


def test_a_failure_is_left_where_sagemaker_looks_for_it(in_tmp: Path, archive: Path) -> None:
    parameters = {
        "dtrain_program": json.dumps(["-m", "distributed_training", "train", "config.yaml", "training.lr=-1"])
    }
    host = Host(in_tmp / "opt", archive, ["algo-1"], 0, parameters)

    done = subprocess.run(host.command(False), cwd=host.code, env=host.variables(), capture_output=True, timeout=120)

    assert done.returncode == 2
    reason = (host.base / "output" / "failure").read_text()
    assert "training.lr=-1" in reason
    assert "must be greater than 0" in reason


def container_of(base: Path, **variables: str) -> Any:
    return read_container({"SAGEMAKER_BASE_DIR": str(base), **variables})


def test_sagemakers_variables_become_ours(tmp_path: Path) -> None:
    program = {"dtrain_program": ["-m", "distributed_training", "train"], "training.lr": 0.5, "model.name": "mlp"}
    container = container_of(
        tmp_path,
        SM_HOSTS='["algo-1", "algo-2"]',
        SM_CURRENT_HOST="algo-2",
        SM_NUM_GPUS="8",
        SM_NETWORK_INTERFACE_NAME="eth0",
        SM_CHANNEL_TRAIN="/opt/ml/input/data/train",
        SM_CHANNEL_CODE="/opt/ml/input/data/code",
        SM_MODEL_DIR="/opt/ml/model",
        SM_HPS=json.dumps(program),
        TRAINING_JOB_NAME="job-1",
    )

    launch = launch_in(container)

    settings = ["training.lr=0.5", "model.name=mlp", f"run.root={tmp_path}/checkpoints"]
    assert launch.program == ["-m", "distributed_training", "train", *settings]
    assert (launch.nproc, launch.machines, launch.node_rank, launch.master) == (8, (2, 2), 1, "algo-1:29400")
    given = launch.variables
    assert given["DTRAIN_DATA__ROOT"] == "/opt/ml/input/data/train"
    assert given["DTRAIN_CHECKPOINT__RESUME"] == "auto"
    assert given["LAUNCHED_JOB"] == "sagemaker-job-1"
    assert given["NCCL_SOCKET_IFNAME"] == given["GLOO_SOCKET_IFNAME"] == "eth0"
    assert given["SM_MODEL_DIR"] == "/opt/ml/model"


def test_hyperparameters_of_a_tuning_job_reach_a_script(tmp_path: Path) -> None:
    config = tmp_path / "input" / "config"
    config.mkdir(parents=True)
    values = {"dtrain_program": '["train.py", "--fast"]', "lr": "0.1", "name": '"adam w"', "_tuning_objective": "x"}
    (config / "hyperparameters.json").write_text(json.dumps(values))

    assert launch_in(container_of(tmp_path)).program == ["train.py", "--fast", "--lr", "0.1", "--name", "adam w"]


def test_what_is_no_job_of_ours_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dtrain_program is missing"):
        launch_in(container_of(tmp_path))
    with pytest.raises(ConfigError, match="SM_HOSTS='algo-1' in the environment is no JSON"):
        container_of(tmp_path, SM_HOSTS="algo-1")
    with pytest.raises(ConfigError, match="none of the job's machines"):
        container_of(tmp_path, SM_HOSTS='["a"]', SM_CURRENT_HOST="b")
