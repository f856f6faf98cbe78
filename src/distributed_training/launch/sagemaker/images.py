"""Which of AWS's deep-learning images a job gets, by framework, version, kind of machine and region.

The accounts and tags are those that AWS documents for its Deep Learning Containers. What is newer than this table is
reached by its address: `--image`.
"""

from __future__ import annotations

import re

from distributed_training.config.check import did_you_mean
from distributed_training.config.errors import ConfigError

_MOST = "763104351884"  # the account of the images in most regions
ACCOUNTS = {
    **dict.fromkeys(("us-east-1", "us-east-2", "us-west-1", "us-west-2", "ca-central-1", "sa-east-1"), _MOST),
    **dict.fromkeys(("eu-central-1", "eu-north-1", "eu-west-1", "eu-west-2", "eu-west-3"), _MOST),
    **dict.fromkeys(("ap-northeast-1", "ap-northeast-2", "ap-south-1", "ap-southeast-1", "ap-southeast-2"), _MOST),
    "af-south-1": "626614931356",
    "ap-east-1": "871362719292",
    "ap-east-2": "975050140332",
    "ap-northeast-3": "364406365360",
    "ap-south-2": "772153158452",
    "ap-southeast-3": "907027046896",
    "ap-southeast-4": "457447274322",
    "ap-southeast-5": "550225433462",
    "ap-southeast-6": "633930458069",
    "ap-southeast-7": "590183813437",
    "ca-west-1": "204538143572",
    "cn-north-1": "727897471807",
    "cn-northwest-1": "727897471807",
    "eu-central-2": "380420809688",
    "eu-south-1": "692866216735",
    "eu-south-2": "503227376785",
    "il-central-1": "780543022126",
    "me-central-1": "914824155844",
    "me-south-1": "217643126080",
    "mx-central-1": "637423239942",
    "us-gov-east-1": "446045086412",
    "us-gov-west-1": "442386744353",
}
# Repository and tag by framework, version of PyTorch and device; the newest version first.
IMAGES: dict[str, dict[str, dict[str, str]]] = {
    "pytorch": {
        "2.10": {
            "gpu": "pytorch-training:2.10.0-gpu-py313-cu130-ubuntu22.04-sagemaker",
            "cpu": "pytorch-training:2.10.0-cpu-py313-ubuntu22.04-sagemaker",
        },
        "2.9": {
            "gpu": "pytorch-training:2.9.0-gpu-py312-cu130-ubuntu22.04-sagemaker",
            "cpu": "pytorch-training:2.9.0-cpu-py312-ubuntu22.04-sagemaker",
        },
    },
    "huggingface": {
        "2.9": {"gpu": "huggingface-pytorch-training:2.9.0-transformers5.3.0-gpu-py312-cu130-ubuntu22.04"},
    },
}
_INSTANCE = re.compile(r"ml\.(?P<family>[a-z][a-z0-9-]*)\.(metal|medium|large|\d*xlarge)(-\w+)?")
_GPU = re.compile(r"(p|g)\d")
_NEURON = re.compile(r"(trn|inf)\d")


def family_of(instance_type: str) -> str:
    """`p4d` of ml.p4d.24xlarge; an error where it is no name of a machine that can be trained on."""
    match = _INSTANCE.fullmatch(instance_type)
    if match is None:
        hint = f"; did you mean ml.{instance_type}?" if _INSTANCE.fullmatch(f"ml.{instance_type}") else ""
        raise ConfigError(
            f"--instance-type {instance_type}: no kind of machine of SageMaker's; they are called like ml.g5.xlarge, "
            f"ml.p4d.24xlarge or ml.m5.2xlarge{hint}"
        )
    if _NEURON.match(match["family"]):
        raise ConfigError(
            f"--instance-type {instance_type}: Trainium and Inferentia need torch-neuronx, for which there is no "
            "strategy here; take a machine with GPUs (ml.g..., ml.p...) or CPUs"
        )
    return match["family"]


def has_gpus(instance_type: str) -> bool:
    """Whether a kind of machine has GPUs."""
    return bool(_GPU.match(family_of(instance_type)))


def choose_image(framework: str, version: str | None, instance_type: str, region: str) -> str:
    """The address of AWS's image."""
    versions = IMAGES[framework]
    short = ".".join(version.split(".")[:2]) if version else next(iter(versions))
    if short not in versions:
        raise ConfigError(
            f"--framework-version {version}: no {framework} image of that version is known here, only "
            f"{', '.join(versions)}; give the address of the one you want: --image ACCOUNT.dkr.ecr.REGION..."
        )
    device = "gpu" if has_gpus(instance_type) else "cpu"
    if device not in versions[short]:
        raise ConfigError(
            f"--framework {framework} has no image for machines without GPUs such as {instance_type}; take --framework "
            "pytorch and sagemaker.extras=[hf], which installs transformers and datasets, or an --image of your own"
        )
    account = ACCOUNTS.get(region)
    if account is None:
        raise ConfigError(
            f"region {region}: it is not known here under which account AWS keeps its images"
            f"{did_you_mean(region, ACCOUNTS)} Otherwise give the address of an image: --image URI"
        )
    domain = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
    return f"{account}.dkr.ecr.{region}.{domain}/{versions[short][device]}"
