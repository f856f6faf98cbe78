"""What is asked of SageMaker: a user's wishes, checked, as the request of CreateTrainingJob."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import PurePosixPath
from typing import Any

from distributed_training.config.errors import ConfigError
from distributed_training.config.sagemaker import SageMakerConfig, job_seconds
from distributed_training.config.sagemaker_container import SOURCE_CHANNEL
from distributed_training.launch.sagemaker.images import choose_image, family_of
from distributed_training.launch.sagemaker.leaks import is_secret_name
from distributed_training.launch.sagemaker.references import check_reference
from distributed_training.launch.sagemaker.starting import ARGUMENTS, ENTRYPOINT

OWN = "dtrain_"
"""How hyper-parameters of ours begin; all others are settings of the training."""
METRICS = [
    {"Name": "train_loss", "Regex": r"  loss ([0-9.eE+-]+)"},
    *(
        {"Name": name, "Regex": rf"{name} ([0-9.eE+-]+)"}
        for name in ("val_loss", "val_accuracy", "val_f1", "val_perplexity")
    ),
]
"""How SageMaker finds the metrics in the lines of `training.progress`, for its console and its tuning jobs."""
_ROLE = re.compile(r"arn:(?P<partition>aws[a-z-]*):iam::(?P<account>\d{12}):role/[\w+=,.@/-]+")
_NAME = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}")
_CHANNEL = re.compile(r"[A-Za-z0-9.\-_]{1,64}")
_ADDRESS = re.compile(r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(?P<key>.*))?")
_PARAMETERS, _KEY, _VALUE = 100, 256, 2500  # SageMaker's limits for hyper-parameters
_VARIABLES, _VARIABLE_VALUE = 100, 512  # and for variables
_KEPT = 6 * 3600  # seconds that machines may wait for a next job
_LOCAL_DATA = "/opt/ml/input/data"


@dataclass(frozen=True, kw_only=True)
class Order:
    """A job as it was asked for."""

    name: str
    region: str
    settings: SageMakerConfig
    framework: str
    """pytorch or huggingface; only where no image is given."""
    program: list[str]
    """Arguments of Python, without settings."""
    overrides: Mapping[str, str] = field(default_factory=dict)
    """Settings of the training from the command line."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the job."""
    nproc: str = "auto"
    max_restarts: int = 0
    deadline: float | None = None

    def __post_init__(self) -> None:
        if not self.settings.instance_type:
            raise ConfigError("--instance-type is missing: say which machine to train on, such as ml.g5.xlarge")
        family_of(self.settings.instance_type)
        account_of(self.settings.role)
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"--job-name {self.name}: letters, digits and hyphens, at most 63, the first no hyphen, as SageMaker "
                "wants it"
            )
        if self.nproc != "auto" and not (self.nproc.isdigit() and int(self.nproc)):
            raise ConfigError(f"--nproc {self.nproc}: give a number, or auto for one process a GPU")
        for channel, address in self.settings.data.items():
            if not _CHANNEL.fullmatch(channel) or channel == SOURCE_CHANNEL:
                raise ConfigError(f"--data {channel}=...: {channel!r} cannot be the name of a channel; take another")
            split_address(str(address), f"--data {channel}={address}")
        for name, reference in self.settings.secrets.items():
            check_reference(name, str(reference))

    @property
    def account(self) -> str:
        """The account that pays for the job."""
        return account_of(self.settings.role)

    @property
    def bucket(self) -> str:
        """The bucket of the job."""
        return self.settings.bucket or f"sagemaker-{self.region}-{self.account}"

    @property
    def folder(self) -> str:
        """The key of the job's folder in the bucket."""
        return "/".join(part for part in (self.settings.prefix.strip("/"), self.name) if part)

    @property
    def source_key(self) -> str:
        """The key of the packed source's folder."""
        return f"{self.folder}/source/"

    @property
    def checkpoints(self) -> str:
        """S3 address of the checkpoints."""
        return self.settings.checkpoints or f"s3://{self.bucket}/{self.folder}/checkpoints"

    @property
    def longest(self) -> int:
        """Seconds after which SageMaker ends the job, waiting for capacity included where it counts."""
        run = job_seconds("--max-run", self.settings.max_run)
        if not self.settings.spot:
            return run
        return job_seconds("--max-wait", self.settings.max_wait) if self.settings.max_wait else min(2 * run, 28 * 86400)


def build_request(order: Order) -> dict[str, Any]:
    """The request, in SageMaker's words."""
    settings = order.settings
    assert settings.instance_type is not None
    run = job_seconds("--max-run", settings.max_run)
    stopping = {"MaxRuntimeInSeconds": run}
    if settings.spot:
        if order.longest < run:
            times = f"--max-wait {settings.max_wait} is less than --max-run {settings.max_run}"
            raise ConfigError(f"{times}, which it includes")
        stopping["MaxWaitTimeInSeconds"] = order.longest
    elif settings.max_wait is not None:
        raise ConfigError("--max-wait is for --spot only: ordinary machines are not waited for")
    image = settings.image or choose_image(
        order.framework, settings.framework_version, settings.instance_type, order.region
    )
    resources: dict[str, Any] = {
        "InstanceType": settings.instance_type,
        "InstanceCount": settings.instances,
        "VolumeSizeInGB": settings.volume_gb,
    }
    if settings.volume_kms_key:
        resources["VolumeKmsKeyId"] = settings.volume_kms_key
    if settings.keep_alive:
        resources["KeepAlivePeriodInSeconds"] = job_seconds("sagemaker.keep_alive", settings.keep_alive)
        if resources["KeepAlivePeriodInSeconds"] > _KEPT:
            raise ConfigError(f"sagemaker.keep_alive={settings.keep_alive}: SageMaker keeps machines for 6h at most")
    output: dict[str, Any] = {"S3OutputPath": "s3://" + "/".join((order.bucket, *order.folder.split("/")[:-1]))}
    if settings.output_kms_key:
        output["KmsKeyId"] = settings.output_kms_key
    request: dict[str, Any] = {
        "TrainingJobName": order.name,
        "RoleArn": settings.role,
        "AlgorithmSpecification": {
            "TrainingImage": image,
            "TrainingInputMode": "File",
            "ContainerEntrypoint": ENTRYPOINT,
            "ContainerArguments": ARGUMENTS,
            "MetricDefinitions": METRICS,
        },
        "HyperParameters": _hyperparameters(order),
        "Environment": _environment(order),
        "InputDataConfig": _channels(order),
        "OutputDataConfig": output,
        "ResourceConfig": resources,
        "StoppingCondition": stopping,
        "CheckpointConfig": {"S3Uri": order.checkpoints, "LocalPath": "/opt/ml/checkpoints"},
        "EnableManagedSpotTraining": settings.spot,
        "EnableNetworkIsolation": settings.isolate,
        "EnableInterContainerTrafficEncryption": settings.encrypt_traffic,
        "Tags": [{"Key": str(name), "Value": str(value)} for name, value in settings.tags.items()],
    }
    split_address(order.checkpoints, f"--checkpoints {order.checkpoints}")
    if bool(settings.subnets) != bool(settings.security_groups):
        raise ConfigError("sagemaker.subnets and sagemaker.security_groups belong together: give both or neither")
    if settings.subnets:
        request["VpcConfig"] = {"Subnets": settings.subnets, "SecurityGroupIds": settings.security_groups}
    return request


def shown(request: Mapping[str, Any]) -> str:
    """The request as JSON for a screen or a log, with values masked that may be secret."""
    masked = {name: "***" if is_secret_name(name) else value for name, value in request.get("Environment", {}).items()}
    return json.dumps({**request, "Environment": masked}, indent=2)


def account_of(role: str | None) -> str:
    """The account in a role's ARN; an error where it is none."""
    if not role:
        raise ConfigError("--role is missing: give the ARN of the job's IAM role (docs/sagemaker.md#permissions)")
    match = _ROLE.fullmatch(role)
    if match is None:
        raise ConfigError(
            f"--role {role}: not the ARN of a role, which looks like arn:aws:iam::123456789012:role/NAME; "
            "`aws iam get-role --role-name NAME` shows it"
        )
    return match["account"]


def split_address(address: str, option: str) -> tuple[str, str]:
    """Bucket and key of an S3 address."""
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise ConfigError(f"{option}: not an S3 address, which looks like s3://BUCKET/FOLDER")
    return match["bucket"], match["key"] or ""


def job_name(program: list[str]) -> str:
    """A name for a job: that of its config file, script or command, the time, and a little chance."""
    words = [word for word in program if not word.startswith("-") and word != "distributed_training"]
    stem = PurePosixPath(words[1] if len(words) > 1 and words[0] == "train" else words[0]).stem
    clean = re.sub(r"[^a-zA-Z0-9]+", "-", stem).strip("-")[:30].strip("-") or "job"
    return f"dtrain-{clean}-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def _hyperparameters(order: Order) -> dict[str, str]:
    """The program and how to start it under names of ours, each setting under its own: the console shows them so."""
    values = {f"{OWN}program": json.dumps(order.program), f"{OWN}nproc": order.nproc, **order.overrides}
    if order.max_restarts:
        values[f"{OWN}max_restarts"] = str(order.max_restarts)
    if order.deadline is not None:
        values[f"{OWN}deadline"] = str(order.deadline)
    if order.settings.secrets:
        values[f"{OWN}secrets"] = json.dumps(order.settings.secrets)
    root = _data_root(order)
    if root is not None:
        values.setdefault("data.root", root)
    if len(values) > _PARAMETERS:
        raise ConfigError(
            f"{len(values)} settings on the command line: SageMaker takes {_PARAMETERS}; put them into the config file"
        )
    for name, value in values.items():
        if len(name) > _KEY or len(value) > _VALUE or "\n" in value:
            what = "the words after -- are" if name == f"{OWN}program" else f"{name} is"
            raise ConfigError(
                f"{what} too long for a hyper-parameter of SageMaker's ({_VALUE} characters in one line); put it into "
                "the config file"
            )
    return values


def _data_root(order: Order) -> str | None:
    """Where the data of the only channel, or of the one called `data`, will be: its folder, or the file it names."""
    channels = order.settings.data
    name = "data" if "data" in channels else next(iter(channels), None)
    if name is None or (len(channels) > 1 and name != "data") or order.program[:2] != ["-m", "distributed_training"]:
        return None
    last = str(channels[name]).rpartition("/")[2]
    return f"{_LOCAL_DATA}/{name}" + (f"/{last}" if "." in last else "")


def _environment(order: Order) -> dict[str, str]:
    values = {"PYTHONUNBUFFERED": "1", **order.environment}
    values |= {str(name): str(value) for name, value in order.settings.environment.items()}
    if len(values) > _VARIABLES:
        raise ConfigError(f"{len(values)} variables: SageMaker takes {_VARIABLES}; put settings into the config file")
    for name, value in values.items():
        if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name):
            raise ConfigError(f"--env {name}: no name of a variable, which has letters, digits and _")
        if len(value) > _VARIABLE_VALUE:
            raise ConfigError(f"--env {name}: {len(value)} characters, and SageMaker takes {_VARIABLE_VALUE}")
    return values


def _channels(order: Order) -> list[dict[str, Any]]:
    source = _channel(SOURCE_CHANNEL, f"s3://{order.bucket}/{order.source_key}", "File")
    return [source, *(_channel(name, str(uri), order.settings.input_mode) for name, uri in order.settings.data.items())]


def _channel(name: str, address: str, mode: str) -> dict[str, Any]:
    source = {"S3DataType": "S3Prefix", "S3Uri": address, "S3DataDistributionType": "FullyReplicated"}
    return {"ChannelName": name, "DataSource": {"S3DataSource": source}, "InputMode": mode}
