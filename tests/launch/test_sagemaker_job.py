"""`dtrain launch --sagemaker` against moto: source in S3, the job as asked for, its log, its end, its model."""

from __future__ import annotations

import io
import json
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore import loaders
from botocore.exceptions import ClientError
from botocore.stub import Stubber
from moto import mock_aws
from moto.core import DEFAULT_ACCOUNT_ID as ACCOUNT
from moto.sagemaker.models import sagemaker_backends
from typer.testing import CliRunner, Result

from distributed_training import DistributedTrainingError
from distributed_training.cli.main import app
from distributed_training.launch.sagemaker import logs
from distributed_training.launch.sagemaker.aws import Aws
from distributed_training.launch.sagemaker.references import fetch_secrets
from distributed_training.runtime.errors import CloudError

LOADER = loaders.create_loader()  # AWS's description of SageMaker takes a second to read: once for all sessions
REGION = "us-east-1"
BUCKET = f"sagemaker-{REGION}-{ACCOUNT}"
ROLE = f"arn:aws:iam::{ACCOUNT}:role/training"
WHERE = ["launch", "--sagemaker", "--region", REGION]
JOB = [*WHERE, "--role", ROLE, "--instance-type", "ml.p4d.24xlarge", "--instances", "2", "--job-name", "job-1"]


@pytest.fixture
def project(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a config, code and a secret, and nothing of the user's AWS profile."""
    for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(in_tmp / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(in_tmp / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
    monkeypatch.setenv("WANDB_API_KEY", "")  # the command takes it from .env, into this process
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setattr(logs, "_PAUSE", 0.01)
    monkeypatch.setattr(loaders, "create_loader", lambda *_: LOADER)
    Path("config.yaml").write_text("training:\n  epochs: 2\n")
    Path("model.py").write_text("x = 1\n")
    Path(".env").write_text("WANDB_API_KEY=verysecretkey\nDTRAIN_TRAINING__SEED=7\n")
    return in_tmp


@pytest.fixture
def aws(project: Path) -> Iterator[Any]:
    with mock_aws():
        yield boto3.session.Session(region_name=REGION)


def dtrain(*words: str) -> Result:
    return CliRunner().invoke(app, [*words], catch_exceptions=True)


def error_of(*words: str) -> str:
    result = dtrain(*words)
    assert isinstance(result.exception, DistributedTrainingError), result.output
    return str(result.exception)


def put_model(session: Any, **files: str) -> None:
    """What a job would leave in S3."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, text in files.items():
            entry = tarfile.TarInfo(name.replace("__", "."))
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text.encode()))
    s3 = session.client("s3")
    s3.create_bucket(Bucket=BUCKET)
    s3.put_object(Bucket=BUCKET, Key="dtrain/job-1/output/model.tar.gz", Body=packed.getvalue())


def put_log(session: Any, *lines: str) -> None:
    client, stream = session.client("logs"), "job-1/algo-1-1700000000"
    client.create_log_group(logGroupName=logs.GROUP)
    client.create_log_stream(logGroupName=logs.GROUP, logStreamName=stream)
    now = int(time.time() * 1000)
    events = [{"timestamp": now + n, "message": line} for n, line in enumerate(lines)]
    client.put_log_events(logGroupName=logs.GROUP, logStreamName=stream, logEvents=events)


def test_a_job_is_started_followed_and_its_model_brought_back(aws: Any, project: Path) -> None:
    put_model(aws, config__yaml="a: 1", model__safetensors="weights")
    put_log(aws, "epoch 1", "epoch 2")
    spot = ("--spot", "--max-run", "1d", "--max-wait", "2d", "--data", "s3://mine/rows")

    result = dtrain(*JOB, *spot, "--", "train", "config.yaml", "training.lr=0.01")

    assert result.exit_code == 0, result.output
    asked = aws.client("sagemaker").describe_training_job(TrainingJobName="job-1")
    assert asked["RoleArn"] == ROLE
    assert asked["ResourceConfig"]["InstanceCount"] == 2
    assert asked["EnableManagedSpotTraining"] is True
    assert asked["StoppingCondition"]["MaxWaitTimeInSeconds"] == 172800
    parameters = asked["HyperParameters"]
    assert json.loads(parameters["dtrain_program"]) == ["-m", "distributed_training", "train", "config.yaml"]
    assert parameters["training.lr"] == "0.01"
    assert parameters["data.root"] == "/opt/ml/input/data/data"
    source = aws.client("s3").get_object(Bucket=BUCKET, Key="dtrain/job-1/source/source.tar.gz")["Body"].read()
    with tarfile.open(fileobj=io.BytesIO(source)) as archive:
        names = archive.getnames()
    assert {"config.yaml", "model.py", ".dtrain/start.sh"} <= {*names}
    assert ".env" not in names
    assert "[algo-1] epoch 1\n[algo-1] epoch 2" in result.output
    assert "verysecretkey" not in result.output + str(asked)
    assert (project / "runs" / "job-1" / "model.safetensors").read_text() == "weights"
    assert not list((project / "runs").glob(".fetching-*"))

    result = dtrain(*WHERE, "--attach", "job-1")  # once more: nothing is overwritten
    assert result.exit_code == 0, result.output
    assert (project / "runs" / "job-1-2" / "config.yaml").is_file()


def test_failed_and_stopped_jobs(aws: Any) -> None:
    put_model(aws, config__yaml="a: 1")
    assert dtrain(*JOB, "--no-wait", "--", "train").exit_code == 0
    job = sagemaker_backends[ACCOUNT][REGION].training_jobs["job-1"]

    job.training_job_status, job.failure_reason = "Failed", "AlgorithmError: rank 3 of 16 failed: ValueError: bad luck"
    said = error_of(*WHERE, "--attach", "job-1")
    assert "rank 3 of 16 failed: ValueError: bad luck" in said
    assert "dtrain/job-1/checkpoints" in said

    job.training_job_status, job.secondary_status = "Stopped", "MaxRuntimeExceeded"
    result = dtrain(*WHERE, "--attach", "job-1")
    assert result.exit_code == 143
    assert f"--checkpoints s3://{BUCKET}/dtrain/job-1/checkpoints" in result.output


def test_ctrl_c_leaves_the_job_running(aws: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(logs.LogReader, "new_lines", interrupt)

    result = dtrain(*JOB, "--", "train")

    assert result.exit_code == 130
    assert "--stop job-1" in result.output


def test_a_log_that_may_not_be_read_is_said_once(aws: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(_: object) -> list[str]:
        raise ClientError({"Error": {"Code": "AccessDeniedException", "Message": "no"}}, "DescribeLogStreams")

    monkeypatch.setattr(logs.LogReader, "_streams", deny)

    result = dtrain(*JOB, "--", "train")

    assert result.exit_code == 0, result.output
    assert result.output.count("logs:GetLogEvents") == 1
    assert "the job left no model" in result.output


def test_a_job_is_stopped(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = boto3.session.Session("key", "secret", region_name=REGION).client("sagemaker")
    monkeypatch.setattr(Aws, "account", lambda _: ACCOUNT)
    monkeypatch.setattr(Aws, "client", lambda *_: client)
    with Stubber(client) as answers:  # moto does not stop jobs
        answers.add_response("stop_training_job", {}, {"TrainingJobName": "job-1"})

        result = dtrain(*WHERE, "--stop", "job-1")

        assert result.exit_code == 0, result.output
        answers.assert_no_pending_responses()


def test_dry_run_sends_nothing_and_shows_no_secret(aws: Any) -> None:
    secret = ("--env", "WANDB_API_KEY", "--env", "NCCL_DEBUG=INFO", "--secret", "HF_TOKEN=secretsmanager:hf#token")

    result = dtrain(*JOB, *secret, "--dry-run", "--", "train", str(Path("config.yaml").absolute()), "model=mlp")

    assert result.exit_code == 0, result.output
    request = json.JSONDecoder().raw_decode(result.output[result.output.index("{") :])[0]
    assert request["TrainingJobName"] == "job-1"
    assert json.loads(request["HyperParameters"]["dtrain_program"])[-1] == "config.yaml"
    sent = {"PYTHONUNBUFFERED": "1", "DTRAIN_TRAINING__SEED": "7", "NCCL_DEBUG": "INFO", "WANDB_API_KEY": "***"}
    assert request["Environment"] == sent
    assert "secretsmanager:hf#token" in result.output
    assert "verysecretkey" not in result.output
    assert "  model.py\n" in result.output
    assert "Left here" in result.output
    assert aws.client("s3").list_buckets()["Buckets"] == []
    assert aws.client("sagemaker").list_training_jobs()["TrainingJobSummaries"] == []


def test_mistakes_end_before_anything_is_uploaded(aws: Any, project: Path) -> None:
    train = ("--", "train", "config.yaml")
    assert "training.epoch; did you mean" in error_of(*JOB, *train, "training.epoch=3")
    assert "at least 1" in error_of(*WHERE, "--role", ROLE, "--instances", "0", *train)
    assert "not the ARN" in error_of(*JOB, "--role", "me", *train)
    assert "no kind of machine" in error_of(*JOB, "--instance-type", "large", *train)
    other = ROLE.replace(ACCOUNT, "999999999999")
    assert "belongs to account 999999999999" in error_of(*JOB, "--role", other, *train)
    assert "bucket mine does not exist" in error_of(*JOB, "--bucket", "mine", *train)
    assert "--nproc two" in error_of(*JOB, "--nproc", "two", *train)
    assert "no such variable" in error_of(*JOB, "--env", "ABSENT", *train)
    assert "--hosts is not for --sagemaker" in error_of(*JOB, "--hosts", "a,b", *train)
    assert "--sagemaker" in error_of("launch", "--instance-type", "ml.g5.xlarge", *train)
    assert "no AWS region" in error_of("launch", "--sagemaker", "--role", ROLE, *train)
    assert "no such file" in error_of(*JOB, "--", "train", "absent.yaml")
    assert aws.client("s3").list_buckets()["Buckets"] == []


def test_no_credentials_and_no_boto3_say_what_to_do(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no AWS credentials were found" in error_of(*JOB, "--", "train")
    monkeypatch.setitem(__import__("sys").modules, "boto3", None)
    assert "distributed-training[sagemaker]" in error_of(*JOB, "--", "train")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("AccessDeniedException", "iam:PassRole"),
        ("ResourceLimitExceeded", "Service Quotas"),
        ("ResourceInUse", "--job-name"),
        ("ExpiredTokenException", "aws sso login"),
    ],
)
def test_what_aws_refuses_is_explained(aws: Any, monkeypatch: pytest.MonkeyPatch, code: str, said: str) -> None:
    def refuse(self: Any, service: str) -> Any:
        client = client_of(self, service)
        if service == "sagemaker":
            answer = {"Error": {"Code": code, "Message": "no"}}
            client.create_training_job = lambda **_: (_ for _ in ()).throw(ClientError(answer, "CreateTrainingJob"))
        return client

    client_of = Aws.client
    monkeypatch.setattr(Aws, "client", refuse)

    assert said in error_of(*JOB, "--", "train")


def test_secrets_are_fetched_by_reference(aws: Any) -> None:
    aws.client("ssm").put_parameter(Name="/team/hf", Value="hf_one", Type="SecureString")
    aws.client("secretsmanager").create_secret(Name="keys", SecretString='{"wandb": "two"}')

    found = fetch_secrets({"HF_TOKEN": "ssm:/team/hf", "WANDB_API_KEY": "secretsmanager:keys#wandb"}, REGION)

    assert found == {"HF_TOKEN": "hf_one", "WANDB_API_KEY": "two"}
    for wrong in ("ssm:/absent", "secretsmanager:keys#other"):
        with pytest.raises(CloudError, match="reading HF_TOKEN from"):
            fetch_secrets({"HF_TOKEN": wrong}, REGION)
