"""The first Python of every machine of a SageMaker job: `python -m distributed_training.launch.sagemaker.entry`.

It reads where it is, starts the ranks of its machine as `dtrain launch` does, and passes SIGTERM on to them, so that
they save before a spot machine is taken away. Runs live in the folder that SageMaker keeps in step with S3: started
again, the same job finds its run there and goes on. At the end the first machine leaves the model where SageMaker looks
for it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed_training.config.errors import ConfigError, DistributedTrainingError
from distributed_training.config.load import variable
from distributed_training.config.sagemaker_container import Container, describing, read_container
from distributed_training.launch.sagemaker.references import fetch_secrets
from distributed_training.launch.sagemaker.request import OWN
from distributed_training.runtime.errors import RanksError
from distributed_training.runtime.run_directory import RunDirectory
from distributed_training.runtime.threads import keep_waits_short
from distributed_training.runtime.world import JOB_VARIABLE

if TYPE_CHECKING:
    from distributed_training.launch.local import Launch

PORT = 29400
_DEVICES = Path("/dev/infiniband")
_DIRECT = ("p4d", "p4de", "p5", "p6")  # whose adapters write into the memory of GPUs
_WELL = (0, 128 + signal.SIGTERM, 128 + signal.SIGINT)  # done, or stopped with everything saved
_EXPORTING = 1800.0  # seconds
_NAMES = 300.0  # seconds
_REASON = 1000  # characters: SageMaker shows about as many
_DTRAIN = ["-m", "distributed_training"]
logger = logging.getLogger(__name__)


def main() -> None:
    """Run this machine's part of the job, and exit with its code."""
    keep_waits_short()
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
    container = Container()
    try:
        container = read_container()
        code, report = _run(container)
    except DistributedTrainingError as error:
        code, report = error.exit_code, str(error)
    if code and report:
        _leave_reason(container, report)
    sys.exit(code)


def _run(container: Container) -> tuple[int, str]:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from distributed_training.launch.local import run  # torch, only now that its variables are there

    launch = launch_in(container)
    container.checkpoints.mkdir(parents=True, exist_ok=True)
    machines = f"machine {container.number + 1} of {len(container.hosts)} ({container.host})"
    logger.info("%s: %d process%s", machines, launch.nproc, "es" if launch.nproc > 1 else "")
    _wait_for_names(container)
    outcome = run(launch)
    if outcome.report:
        sys.stderr.write(f"{outcome.report}\n")
    if container.number == 0 and outcome.code in _WELL:
        _export(container, complete=outcome.code == 0)
    return outcome.code, outcome.report


def launch_in(container: Container) -> Launch:
    """What this machine starts."""
    from distributed_training.launch.local import Launch, one_per_gpu

    own = {name.removeprefix(OWN): value for name, value in container.hyperparameters.items() if name.startswith(OWN)}
    nproc = own.get("nproc", "auto")
    gpus = container.gpus if container.gpus is not None else _gpus()
    several = len(container.hosts) > 1
    references = _json(own, "secrets")
    return Launch(
        program=_program(container, own),
        nproc=int(nproc) if nproc.isdigit() else gpus or one_per_gpu(),
        machines=(len(container.hosts), len(container.hosts)),
        node_rank=container.number,
        master=f"{container.hosts[0]}:{PORT}" if several else None,
        max_restarts=int(own.get("max_restarts", "0")),
        deadline=float(own["deadline"]) if "deadline" in own else None,
        variables={
            **describing(container, gpus),
            **_settings(container),
            **(_network(container) if several else {}),
            **fetch_secrets(references, variable("AWS_REGION") or variable("AWS_DEFAULT_REGION")),
        },
    )


def _program(container: Container, own: Mapping[str, str]) -> list[str]:
    """The command with its settings: those of the command line, or whatever a tuning job of SageMaker's has chosen."""
    words = _json(own, "program")
    if not isinstance(words, list) or not words:
        raise ConfigError(
            f"the hyper-parameter {OWN}program is missing: start the job with `dtrain launch --sagemaker -- COMMAND`"
        )
    settings = {
        name: value
        for name, value in container.hyperparameters.items()
        if not name.startswith((OWN, "sagemaker_", "_tuning"))
    }
    if words[:2] == _DTRAIN:
        if words[2:3] == ["train"]:
            settings["run.root"] = str(container.checkpoints)  # over what the command line says: only there it is kept
        return [*words, *(f"{name}={value}" for name, value in settings.items())]
    return [*words, *(word for name, value in settings.items() for word in (f"--{name}", value))]


def _settings(container: Container) -> dict[str, str]:
    """Settings of ours for every program that reads them from the environment; a user's own are kept."""
    wanted = {"DTRAIN_RUN__ROOT": str(container.checkpoints)}
    if variable("DTRAIN_CHECKPOINT__RESUME") is None:
        wanted["DTRAIN_CHECKPOINT__RESUME"] = "auto"
    if container.job:
        wanted[JOB_VARIABLE] = f"sagemaker-{container.job}"
    names = list(container.channels)
    channel = "data" if "data" in names else names[0] if len(names) == 1 else None
    if channel is not None and variable("DTRAIN_DATA__ROOT") is None:
        wanted["DTRAIN_DATA__ROOT"] = str(container.channels[channel])
    return wanted


def _network(container: Container) -> dict[str, str]:
    """Which network the ranks use, and how NCCL uses AWS's fast one where the machine has it. A user's own are kept."""
    wanted: dict[str, str] = {}
    if container.interface:
        wanted |= {"NCCL_SOCKET_IFNAME": container.interface, "GLOO_SOCKET_IFNAME": container.interface}
    if any(_DEVICES.glob("uverbs*")):
        wanted |= {"FI_PROVIDER": "efa", "FI_EFA_FORK_SAFE": "1", "RDMAV_FORK_SAFE": "1"}
        family = container.instance_type.split(".")[1] if container.instance_type.count(".") > 1 else ""
        if family.startswith(_DIRECT):
            wanted["FI_EFA_USE_DEVICE_RDMA"] = "1"
    return {name: value for name, value in wanted.items() if variable(name) is None}


def _wait_for_names(container: Container) -> None:
    """Names of machines are known some time after the start; what uses them does not ask twice."""
    end = time.monotonic() + _NAMES
    for host in container.hosts if len(container.hosts) > 1 else ():
        while True:
            try:
                socket.getaddrinfo(host, PORT)
                break
            except OSError as error:
                if time.monotonic() > end:
                    raise RanksError(
                        f"{container.host} does not find machine {host} after {_NAMES:g} s: {error}"
                    ) from None
                time.sleep(1)


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _json(own: Mapping[str, str], name: str) -> Any:
    try:
        return json.loads(own.get(name, "{}"))
    except ValueError:
        raise ConfigError(f"the hyper-parameter {OWN}{name}={own[name]!r} is no JSON") from None


def _export(container: Container, complete: bool) -> None:
    """The model also of a training that was stopped: its checkpoint is good. There is little time then."""
    from distributed_training.launch.sagemaker.exporting import export

    run = export(container.checkpoints, container.model)
    if run is None:
        return
    logger.info("the model of %s is in %s", run, container.model)
    if complete and RunDirectory(run).load_config().model.name == "huggingface":
        words = ["export", str(run), "--to", str(container.model / "huggingface")]
        done = subprocess.run([sys.executable, *_DTRAIN, *words], timeout=_EXPORTING)
        if done.returncode:
            logger.warning(
                "it could not be written as save_pretrained does: see above. `dtrain export` can do it later"
            )


def _leave_reason(container: Container, report: str) -> None:
    """For SageMaker's FailureReason, which is short: the end of a report has the error itself."""
    last = report if len(report) <= _REASON else f"...{report[-_REASON:]}"
    text = f"{container.host}: {last}" if len(container.hosts) > 1 else last
    container.failure.parent.mkdir(parents=True, exist_ok=True)
    container.failure.write_text(text, encoding="utf-8")
    if not sys.stderr.closed:
        sys.stderr.write("" if report in text else f"{report}\n")


if __name__ == "__main__":
    main()
