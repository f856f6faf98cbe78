"""The settings of a training job on Amazon SageMaker."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from distributed_training.config.check import at_least, check_types, seconds_of
from distributed_training.config.errors import ConfigError

_LONGEST = 28 * 86400  # seconds that SageMaker lets a job run


@dataclass(kw_only=True)
class SageMakerConfig:
    """A job on Amazon SageMaker (`dtrain launch --sagemaker`). The options of that command go before these."""

    role: str | None = None
    """ARN of the IAM role that the job has: `arn:aws:iam::123456789012:role/NAME`."""
    region: str | None = None
    """AWS region. Left out: that of your AWS profile or of AWS_REGION."""
    bucket: str | None = None
    """S3 bucket for source, checkpoints and model. Left out: SageMaker's own, `sagemaker-REGION-ACCOUNT`."""
    prefix: str = "dtrain"
    """Folder in the bucket below which every job has one of its own."""
    instance_type: str | None = None
    """Kind of machine, such as ml.g5.xlarge or ml.p4d.24xlarge."""
    instances: int = 1
    """How many machines."""
    framework: Literal["auto", "huggingface", "pytorch"] = "auto"
    """Which of AWS's images to take. auto: huggingface if model or dataset is of that name, else pytorch."""
    framework_version: str | None = None
    """Version of PyTorch in the image, such as 2.10. Left out: the newest that is known here."""
    image: str | None = None
    """An image of your own in ECR, instead of one of AWS's: it needs Python 3.11, torch and pip."""
    extras: list[str] = field(default_factory=list)
    """Extras of distributed-training to install in the container, such as hf. Those of the trackers are added."""
    spot: bool = False
    """Take spare capacity: much cheaper, and interrupted now and then. The job goes on from its checkpoint."""
    max_run: str = "1d"
    """Longest time of training: 90m, 12h, 5d."""
    max_wait: str | None = None
    """spot: longest time in all, waiting for capacity included. Left out: twice `max_run`."""
    keep_alive: str | None = None
    """How long the machines wait, paid for, for a next job of the same kind: 30m. It then starts in seconds."""
    volume_gb: int = 100
    """Disk of each machine, for data, checkpoints and model. Kinds with disks of their own ignore it."""
    data: dict[str, Any] = field(default_factory=dict)
    """Channels: a name and an S3 address each. The job finds them in /opt/ml/input/data/NAME."""
    input_mode: Literal["File", "FastFile"] = "File"
    """File copies the data before the start; FastFile reads it from S3 when it is needed."""
    checkpoints: str | None = None
    """S3 address of the checkpoints. Left out: in the job's folder. That of an earlier job goes on with its run."""
    secrets: dict[str, Any] = field(default_factory=dict)
    """Variables whose values the job fetches itself: `HF_TOKEN: ssm:/team/hf`, or `secretsmanager:NAME#KEY`."""
    environment: dict[str, Any] = field(default_factory=dict)
    """Variables of the job. Whoever may describe the job can read them: nothing secret belongs here."""
    tags: dict[str, Any] = field(default_factory=dict)
    """Tags of the job, for example for the bill."""
    subnets: list[str] = field(default_factory=list)
    """Subnets of your VPC that the machines are in."""
    security_groups: list[str] = field(default_factory=list)
    """Security groups of the machines; with `subnets`."""
    volume_kms_key: str | None = None
    """KMS key that encrypts the disks."""
    output_kms_key: str | None = None
    """KMS key that encrypts what is written to S3."""
    encrypt_traffic: bool = False
    """Encrypt what the machines say to each other: slower."""
    isolate: bool = False
    """No network for the containers. The image must then hold all that the training needs."""
    exclude: list[str] = field(default_factory=list)
    """Patterns of files that are not packed, beside those in .gitignore: `notebooks/*`."""
    max_source_mb: int = 200
    """Largest source that is packed. Data belongs in S3, not beside the source."""

    def __post_init__(self) -> None:
        check_types(self, "sagemaker")
        at_least("sagemaker.instances", self.instances, 1)
        at_least("sagemaker.volume_gb", self.volume_gb, 1)
        at_least("sagemaker.max_source_mb", self.max_source_mb, 1)
        for name in ("max_run", "max_wait", "keep_alive"):
            if getattr(self, name) is not None:
                job_seconds(f"sagemaker.{name}", getattr(self, name))


def job_seconds(key: str, text: str) -> int:
    """A time that SageMaker takes, in seconds."""
    seconds = int(seconds_of(key, text))
    if not 1 <= seconds <= _LONGEST:
        raise ConfigError(f"{key}={text!r}: SageMaker takes times from 1s to 28d")
    return seconds
