"""What is asked of SageMaker: images, hyper-parameters, limits, spot, secrets; and what is refused before that."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from distributed_training import DistributedTrainingError
from distributed_training.config import SageMakerConfig
from distributed_training.launch.sagemaker.images import ACCOUNTS, IMAGES, choose_image
from distributed_training.launch.sagemaker.request import METRICS, Order, build_request, job_name, shown
from distributed_training.training.progress import figures

ROLE = "arn:aws:iam::123456789012:role/training"
TRAIN = ["-m", "distributed_training", "train", "configs/text.yaml"]


def order(
    name: str = "job-1", program: list[str] = TRAIN, more: dict[str, Any] | None = None, **settings: Any
) -> Order:
    base = {"role": ROLE, "instance_type": "ml.p4d.24xlarge"}
    section = SageMakerConfig(**{**base, **settings})
    return Order(name=name, region="eu-west-1", settings=section, framework="pytorch", program=program, **(more or {}))


def test_a_job_on_two_machines() -> None:
    wanted = order(
        instances=2,
        data={"train": "s3://mine/rows/part.csv"},
        secrets={"HF_TOKEN": "ssm:/team/hf"},
        tags={"team": "speech"},
        subnets=["subnet-1"],
        security_groups=["sg-1"],
        more={"overrides": {"training.lr": "0.01"}, "nproc": "8", "environment": {"DTRAIN_TRAINING__EPOCHS": "3"}},
    )

    request = build_request(wanted)

    image = request["AlgorithmSpecification"]["TrainingImage"]
    assert image.startswith("763104351884.dkr.ecr.eu-west-1.amazonaws.com/pytorch-training:")
    assert "-gpu-" in image
    assert all(len(word) <= 256 for word in request["AlgorithmSpecification"]["ContainerArguments"])
    assert request["ResourceConfig"] == {
        "InstanceType": "ml.p4d.24xlarge",
        "InstanceCount": 2,
        "VolumeSizeInGB": 100,
    }
    parameters = request["HyperParameters"]
    assert json.loads(parameters["dtrain_program"]) == TRAIN
    assert parameters["training.lr"] == "0.01"
    assert parameters["data.root"] == "/opt/ml/input/data/train/part.csv"
    assert json.loads(parameters["dtrain_secrets"]) == {"HF_TOKEN": "ssm:/team/hf"}
    assert all(isinstance(value, str) for value in parameters.values())
    assert request["Environment"]["DTRAIN_TRAINING__EPOCHS"] == "3"
    assert [channel["ChannelName"] for channel in request["InputDataConfig"]] == ["code", "train"]
    bucket = "s3://sagemaker-eu-west-1-123456789012/dtrain"
    assert request["OutputDataConfig"] == {"S3OutputPath": bucket}
    assert request["CheckpointConfig"] == {"S3Uri": f"{bucket}/job-1/checkpoints", "LocalPath": "/opt/ml/checkpoints"}
    assert request["VpcConfig"] == {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1"]}
    assert request["Tags"] == [{"Key": "team", "Value": "speech"}]


def test_sagemaker_finds_the_metrics_in_the_log() -> None:
    line = f"epoch 1/3  {figures({'train_loss': 0.5, 'val_loss': 12.25, 'val_accuracy': 0.875})}  ETA 0:01"

    found = {metric["Name"]: re.findall(metric["Regex"], line) for metric in METRICS}

    assert {name: values for name, values in found.items() if values} == {
        "train_loss": ["0.5000"],
        "val_loss": ["12.2500"],
        "val_accuracy": ["0.8750"],
    }


def test_spot_waits_and_keeps_the_checkpoints_of_an_earlier_job() -> None:
    request = build_request(order(spot=True, max_run="12h", max_wait="2d", checkpoints="s3://mine/old/checkpoints"))

    assert request["EnableManagedSpotTraining"] is True
    assert request["StoppingCondition"] == {"MaxRuntimeInSeconds": 43200, "MaxWaitTimeInSeconds": 172800}
    assert request["CheckpointConfig"]["S3Uri"] == "s3://mine/old/checkpoints"


def test_what_is_shown_has_no_secrets() -> None:
    request = build_request(order(environment={"WANDB_API_KEY": "0123456789abcdef", "NCCL_DEBUG": "INFO"}))

    text = shown(request)

    assert "0123456789abcdef" not in text
    assert json.loads(text)["Environment"]["NCCL_DEBUG"] == "INFO"
    assert request["Environment"]["WANDB_API_KEY"] == "0123456789abcdef"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"role": "my-role"}, "not the ARN of a role"),
        ({"role": None}, "--role is missing"),
        ({"instance_type": None}, "--instance-type is missing"),
        ({"instance_type": "p4d.24xlarge"}, r"did you mean ml\.p4d\.24xlarge"),
        ({"instance_type": "ml.trn1.32xlarge"}, "Trainium"),
        ({"instances": 0}, "instances=0 must be at least 1"),
        ({"max_run": "40d"}, "to 28d"),
        ({"keep_alive": "7h"}, "6h at most"),
        ({"max_wait": "2d"}, "--max-wait is for --spot"),
        ({"spot": True, "max_run": "2d", "max_wait": "1d"}, "less than --max-run"),
        ({"data": {"train": "/home/me"}}, "not an S3 address"),
        ({"data": {"code": "s3://mine/x"}}, "cannot be the name of a channel"),
        ({"secrets": {"HF_TOKEN": "hf_abcdefghij"}}, "not a reference"),
        ({"subnets": ["subnet-1"]}, "belong together"),
        ({"framework_version": "1.4"}, r"no pytorch image .* --image"),
        ({"environment": {"A B": "1"}}, "no name of a variable"),
        ({"environment": {"A": "x" * 513}}, "SageMaker takes 512"),
    ],
)
def test_what_sagemaker_would_refuse_is_refused_here(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(DistributedTrainingError, match=said) as error:
        build_request(order(**settings))
    assert "hf_abcdefghij" not in str(error.value)


def test_long_and_many_settings_are_sent_to_the_config_file() -> None:
    with pytest.raises(DistributedTrainingError, match=r"model\.args is too long .* config file"):
        build_request(order(more={"overrides": {"model.args": "x" * 2501}}))
    with pytest.raises(DistributedTrainingError, match="SageMaker takes 100"):
        build_request(order(more={"overrides": {f"model.args.a{n}": "1" for n in range(100)}}))


def test_images_of_all_regions_and_frameworks() -> None:
    for region in ACCOUNTS:
        for framework in IMAGES:
            image = choose_image(framework, None, "ml.g5.xlarge", region)
            assert f".ecr.{region}." in image
    assert choose_image("pytorch", "2.9.0", "ml.m5.xlarge", "cn-north-1").split("/") == [
        "727897471807.dkr.ecr.cn-north-1.amazonaws.com.cn",
        IMAGES["pytorch"]["2.9"]["cpu"],
    ]
    with pytest.raises(DistributedTrainingError, match="--image"):
        choose_image("pytorch", None, "ml.g5.xlarge", "moon-west-1")
    with pytest.raises(DistributedTrainingError, match=r"--framework pytorch and sagemaker\.extras"):
        choose_image("huggingface", None, "ml.m5.xlarge", "us-east-1")


def test_jobs_get_names_that_sagemaker_takes() -> None:
    for program in (TRAIN, ["-m", "distributed_training", "train"], ["my script_v2.py", "--x"], ["-m", "pkg.mod"]):
        assert order(job_name(program)).name.startswith("dtrain-")
    with pytest.raises(DistributedTrainingError, match="--job-name"):
        order("my_job")
