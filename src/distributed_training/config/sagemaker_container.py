"""What SageMaker tells a container: in variables (SM_..., of its toolkit), and in the files below /opt/ml."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distributed_training.config.errors import ConfigError

SOURCE_CHANNEL = "code"
"""The channel that brings the source: no data."""


@dataclass(frozen=True)
class Container:
    """One machine of a training job."""

    base: Path = Path("/opt/ml")
    """Where everything of the job is."""
    hosts: tuple[str, ...] = ("localhost",)
    """All machines, in the order of their ranks: the first is where they meet."""
    host: str = "localhost"
    """This machine among them."""
    gpus: int | None = None
    """GPUs of this machine, where SageMaker says it."""
    interface: str | None = None
    """The network that leads to the other machines."""
    instance_type: str = ""
    """Kind of this machine."""
    job: str = ""
    """Name of the job: the same when it is started again after an interruption."""
    hyperparameters: Mapping[str, str] = field(default_factory=dict)
    """Hyper-parameters as text."""
    channels: Mapping[str, Path] = field(default_factory=dict)
    """Folders of the input data, by channel."""
    model: Path = Path("/opt/ml/model")
    """What is left here comes back as model.tar.gz."""
    output_data: Path = Path("/opt/ml/output/data")
    """What is left here comes back as output.tar.gz."""

    @property
    def number(self) -> int:
        """Number of this machine, from 0."""
        return self.hosts.index(self.host)

    @property
    def checkpoints(self) -> Path:
        """Folder that SageMaker keeps in step with S3."""
        return self.base / "checkpoints"

    @property
    def failure(self) -> Path:
        """File whose first kilobyte SageMaker shows as the reason of a failure."""
        return self.base / "output" / "failure"


def read_container(environ: Mapping[str, str] | None = None) -> Container:
    """The machine that this process runs on. Variables go before files: a toolkit that sets them knows more."""
    given = os.environ if environ is None else environ
    base = Path(given.get("SAGEMAKER_BASE_DIR", "/opt/ml"))
    resources = _file(base, "resourceconfig.json")
    hosts = tuple(_json(given, "SM_HOSTS", resources.get("hosts") or ["localhost"]))
    host = given.get("SM_CURRENT_HOST") or resources.get("current_host") or hosts[0]
    if host not in hosts:
        raise ConfigError(f"SM_CURRENT_HOST={host} is none of the job's machines, SM_HOSTS={list(hosts)}")
    gpus = given.get("SM_NUM_GPUS", "")
    return Container(
        base=base,
        hosts=hosts,
        host=host,
        gpus=int(gpus) if gpus.isdigit() else None,
        interface=given.get("SM_NETWORK_INTERFACE_NAME") or resources.get("network_interface_name"),
        instance_type=given.get("SM_CURRENT_INSTANCE_TYPE") or resources.get("current_instance_type") or "",
        job=given.get("TRAINING_JOB_NAME", ""),
        hyperparameters=_hyperparameters(given, base),
        channels=_channels(given, base),
        model=Path(given.get("SM_MODEL_DIR", base / "model")),
        output_data=Path(given.get("SM_OUTPUT_DATA_DIR", base / "output" / "data")),
    )


def describing(container: Container, gpus: int) -> dict[str, str]:
    """The variables by which scripts written for SageMaker know where they are."""
    return {
        "SM_HOSTS": json.dumps(list(container.hosts)),
        "SM_CURRENT_HOST": container.host,
        "SM_NUM_GPUS": str(gpus),
        "SM_NETWORK_INTERFACE_NAME": container.interface or "",
        "SM_CURRENT_INSTANCE_TYPE": container.instance_type,
        "SM_INPUT_DIR": str(container.base / "input"),
        "SM_OUTPUT_DIR": str(container.base / "output"),
        "SM_MODEL_DIR": str(container.model),
        "SM_OUTPUT_DATA_DIR": str(container.output_data),
        "SM_CHANNELS": json.dumps(list(container.channels)),
        **{f"SM_CHANNEL_{name.upper()}": str(path) for name, path in container.channels.items()},
    }


def _hyperparameters(given: Mapping[str, str], base: Path) -> dict[str, str]:
    """As text. SageMaker's SDK and tuner write text as JSON, in quotes; SM_HPS holds values that are decoded."""
    raw = _file(base, "hyperparameters.json") or _json(given, "SM_HPS", {})
    return {str(name): _text(value) for name, value in raw.items()}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        return json.dumps(value)
    if value.startswith('"'):
        try:
            decoded = json.loads(value)
        except ValueError:
            return value
        return decoded if isinstance(decoded, str) else value
    return value


def _channels(given: Mapping[str, str], base: Path) -> dict[str, Path]:
    told = {
        name.removeprefix("SM_CHANNEL_").lower(): Path(path)
        for name, path in given.items()
        if name.startswith("SM_CHANNEL_")
    }
    named = {name: base / "input" / "data" / name for name in _file(base, "inputdataconfig.json")}
    known = {name.lower() for name in named}
    found = {**named, **{name: path for name, path in told.items() if name not in known}}
    return {name: path for name, path in found.items() if name != SOURCE_CHANNEL}


def _file(base: Path, name: str) -> dict[str, Any]:
    path = base / "input" / "config" / name
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); SageMaker writes it before a job starts") from None
    return content if isinstance(content, dict) else {}


def _json(given: Mapping[str, str], name: str, default: Any) -> Any:
    if not given.get(name):
        return default
    try:
        return json.loads(given[name])
    except ValueError:
        raise ConfigError(f"{name}={given[name]!r} in the environment is no JSON") from None
