"""A job from here to its end: source to S3, the job started, its log shown, its model brought back."""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path
from typing import Any

from distributed_training.launch.sagemaker import logs
from distributed_training.launch.sagemaker.aws import Aws, error_code, explained
from distributed_training.launch.sagemaker.fetching import bring_back
from distributed_training.launch.sagemaker.logs import Say
from distributed_training.launch.sagemaker.packing import Source, write_archive
from distributed_training.launch.sagemaker.request import Order, build_request, shown
from distributed_training.launch.sagemaker.starting import ARCHIVE
from distributed_training.runtime.errors import CloudError

_STOPPED = 128 + signal.SIGTERM
_LEFT = 128 + signal.SIGINT


def describe_order(aws: Aws, order: Order, source: Source, say: Say) -> None:
    """Say what would be asked of SageMaker and what would be packed. Nothing is sent."""
    request = build_request(order)
    aws.check_request("CreateTrainingJob", request)
    say(shown(request))
    say(f"\nWould be packed from {source.root}: {len(source.files)} files, {source.size / 1e6:.1f} MB")
    for file in source.files:
        say(f"  {file}")
    if source.left_here:
        say("Left here, because they hold secrets or lead out of the folder:")
        for file in source.left_here:
            say(f"  {file}")
    say(f"Installed in the container:\n{''.join(f'  {line}' for line in source.requirements.splitlines(True))}")


def submit(aws: Aws, order: Order, source: Source, say: Say) -> None:
    """Check, upload and start. An error before the upload leaves nothing in AWS."""
    request = build_request(order)
    aws.check_request("CreateTrainingJob", request)
    account = aws.account()
    if account != order.account:
        raise CloudError(
            f"--role {order.settings.role} belongs to account {order.account}, and your credentials to {account}: a "
            "job takes a role of its own account. Use another profile (AWS_PROFILE) or another role"
        )
    _check_bucket(aws, order, say)
    _upload(aws, order, source, say)
    with explained(f"starting job {order.name}", "sagemaker:CreateTrainingJob, sagemaker:AddTags and iam:PassRole"):
        aws.client("sagemaker").create_training_job(**request)
    kind = f"{order.settings.instances} x {order.settings.instance_type}{' (spot)' if order.settings.spot else ''}"
    say(f"job {order.name} started: {kind}, {order.region}")


def watch(aws: Aws, job: str, runs: Path, say: Say, longest: float) -> int:
    """Follow a job and bring its model back; the exit code. Ctrl-C leaves the job running."""
    again = f"dtrain launch --sagemaker --region {aws.region} --attach {job}"
    try:
        state = logs.follow(aws, job, say, longest)
    except CloudError as error:  # credentials that end, a network that is gone
        raise CloudError(f"{error}. The job itself may go on: {again}") from None
    except KeyboardInterrupt:
        say(f"\njob {job} goes on without you.")
        say(f"  follow it again   {again}")
        say(f"  stop it           dtrain launch --sagemaker --region {aws.region} --stop {job}")
        return _LEFT
    _say_cost(state, say)
    status = state["TrainingJobStatus"]
    if status == "Failed":
        raise CloudError(
            f"job {job} failed: {state.get('FailureReason', 'SageMaker gives no reason')}. Its checkpoints, if there "
            f"are any, are in {_checkpoints(state)}"
        )
    run = bring_back(aws, state, runs)
    if run is not None:
        say(f"its model is here: {run}")
        if (run / "config.yaml").is_file():
            say(f"  dtrain validate {run} data.root=FOLDER    evaluate it on data that is here")
    else:
        say("the job left no model")
    if status == "Stopped":
        how = state.get("SecondaryStatus", status)
        say(f"job {job} was stopped ({how}) before its end; go on with its checkpoints:")
        say(f"  dtrain launch --sagemaker --checkpoints {_checkpoints(state)} ...")
        return _STOPPED
    return 0


def stop(aws: Aws, job: str, say: Say) -> None:
    """Ask SageMaker to end a job: its ranks save, and have two minutes for it."""
    with explained(f"stopping job {job}", "sagemaker:StopTrainingJob"):
        aws.client("sagemaker").stop_training_job(TrainingJobName=job)
    say(f"job {job} was asked to stop; it saves a checkpoint first")


def _check_bucket(aws: Aws, order: Order, say: Say) -> None:
    """The bucket can be used; SageMaker's own is made where it is not there yet, as SageMaker's tools do."""
    from botocore.exceptions import ClientError

    s3, own = aws.client("s3"), order.settings.bucket is None
    # Names of such buckets can be guessed: somebody else's must not get the source.
    owner = {"ExpectedBucketOwner": order.account} if own else {}
    try:
        s3.head_bucket(Bucket=order.bucket, **owner)
        return
    except ClientError as error:
        code = error_code(error)
    if code == "404" and own:
        place = {"CreateBucketConfiguration": {"LocationConstraint": order.region}}
        where = {} if order.region == "us-east-1" else place
        with explained(f"making bucket {order.bucket}", "s3:CreateBucket"):
            s3.create_bucket(Bucket=order.bucket, **where)
        say(f"bucket {order.bucket} made")
        return
    why = "does not exist" if code == "404" else "is not yours, or you may not use it"
    if code == "301":
        why = f"is in another region than {order.region}"
    raise CloudError(
        f"bucket {order.bucket} {why} ({code}); choose another with --bucket, or ask for s3:ListBucket, s3:GetObject "
        "and s3:PutObject there (docs/sagemaker.md#permissions)"
    )


def _upload(aws: Aws, order: Order, source: Source, say: Say) -> None:
    key = f"{order.source_key}{ARCHIVE}"
    more: dict[str, Any] = {}
    if order.settings.output_kms_key:
        more = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": order.settings.output_kms_key}
    with tempfile.TemporaryDirectory(prefix="dtrain-source-") as folder:
        archive = Path(folder, ARCHIVE)
        write_archive(source, archive)
        size = archive.stat().st_size
        with explained(f"uploading the source to s3://{order.bucket}/{key}", "s3:PutObject"):
            aws.client("s3").upload_file(str(archive), order.bucket, key, ExtraArgs=more)
    say(f"source: {len(source.files)} files, {size / 1e6:.1f} MB packed, in s3://{order.bucket}/{key}")


def _say_cost(state: dict[str, Any], say: Say) -> None:
    spent, billed = state.get("TrainingTimeInSeconds"), state.get("BillableTimeInSeconds")
    if spent and billed is not None:
        saved = f", {1 - billed / spent:.0%} less than it took" if state.get("EnableManagedSpotTraining") else ""
        say(f"trained for {spent} s, billed {billed} s for each machine{saved}")


def _checkpoints(state: dict[str, Any]) -> str:
    return str(state.get("CheckpointConfig", {}).get("S3Uri", "S3"))
