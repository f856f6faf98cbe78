"""The way to AWS: one session, and its errors in words that say what to do next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from distributed_training.config.errors import ConfigError
from distributed_training.runtime.errors import CloudError
from distributed_training.runtime.imports import require

_CONNECT, _READ, _TRIES = 10, 60, 8  # seconds, seconds, and how often a call is made in all
_DENIED = ("AccessDenied", "AccessDeniedException", "AuthorizationError", "UnauthorizedOperation", "403")
_STALE = (
    "ExpiredToken",
    "ExpiredTokenException",
    "RequestExpired",
    "InvalidClientTokenId",
    "UnrecognizedClientException",
    "SignatureDoesNotMatch",
    "InvalidAccessKeyId",
)
_SIGN_IN = "sign in (`aws configure`, `aws sso login`), or set AWS_PROFILE or AWS_ACCESS_KEY_ID and its companions"


class Aws:
    """A session in one region. Clients are made when they are needed, and kept."""

    def __init__(self, region: str | None) -> None:
        boto3 = require("boto3", "sagemaker", "dtrain launch --sagemaker")
        with explained("reading your AWS profile", ""):
            self._session = boto3.session.Session(region_name=region)
        self._clients: dict[str, Any] = {}
        if self._session.region_name is None:
            raise ConfigError("no AWS region: give --region, such as --region us-east-1, or set AWS_REGION")
        self.region = str(self._session.region_name)

    def client(self, service: str) -> Any:
        """The client of a service: s3, sagemaker, logs, sts."""
        if service not in self._clients:
            from botocore.config import Config

            waits = Config(
                connect_timeout=_CONNECT, read_timeout=_READ, retries={"mode": "standard", "max_attempts": _TRIES}
            )
            self._clients[service] = self._session.client(service, config=waits)
        return self._clients[service]

    def account(self) -> str:
        """The account that the credentials belong to; an error where there are none, or AWS does not know them."""
        if self._session.get_credentials() is None:
            raise CloudError(f"no AWS credentials were found: {_SIGN_IN}")
        with explained("asking AWS who you are", "sts:GetCallerIdentity"):
            return str(self.client("sts").get_caller_identity()["Account"])

    def check_request(self, operation: str, request: dict[str, Any]) -> None:
        """Compare a request with AWS's own description of it, without sending it."""
        from botocore.validate import ParamValidator

        model = self.client("sagemaker").meta.service_model.operation_model(operation)
        problems = ParamValidator().validate(request, model.input_shape)
        if problems.has_errors():
            raise ConfigError(f"SageMaker would refuse this job: {' '.join(problems.generate_report().split())}")

    def close(self) -> None:
        """Close the connections."""
        for client in self._clients.values():
            client.close()
        self._clients.clear()


@contextmanager
def explained(doing: str, action: str) -> Iterator[None]:
    """Turn what boto3 raises into errors of ours. `action` is the permission that the call needs."""
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, PartialCredentialsError

    try:
        from boto3.exceptions import S3UploadFailedError
    except ImportError:  # pragma: no cover (of a boto3 to come)
        S3UploadFailedError = ClientError
    try:
        yield
    except (NoCredentialsError, PartialCredentialsError):
        raise CloudError(f"{doing}: no AWS credentials were found: {_SIGN_IN}") from None
    except ClientError as error:
        raise CloudError(_in_words(error.response.get("Error", {}), doing, action)) from None
    except S3UploadFailedError as error:
        raise CloudError(f"{doing}: {error}; check that you have {action} there") from None
    except BotoCoreError as error:
        advice = "check the network, the region and your profile"
        raise CloudError(f"{doing}: AWS cannot be used: {error}; {advice}") from None


def error_code(error: Any) -> str:
    """The code in an error of boto3's."""
    return str(getattr(error, "response", {}).get("Error", {}).get("Code", ""))


def _in_words(error: dict[str, Any], doing: str, action: str) -> str:
    code, said = str(error.get("Code", "")), " ".join(str(error.get("Message", "")).split())
    if code in _DENIED:
        return (
            f"{doing}: AWS denies it ({said or code}). Your user or role needs {action} (docs/sagemaker.md#permissions)"
        )
    if code in _STALE:
        return f"{doing}: AWS does not accept your credentials ({said or code}): {_SIGN_IN}"
    if code == "ResourceLimitExceeded":
        return (
            f"{doing}: your account's quota is too small ({said}). Ask for more under Service Quotas > Amazon "
            "SageMaker (spot and ordinary machines count apart), or take another --instance-type or fewer --instances"
        )
    if code == "ResourceInUse":
        return f"{doing}: a job of that name exists ({said}); choose another --job-name"
    if code in ("NoSuchBucket", "404"):
        return f"{doing}: there is no such bucket or file ({said or code}); check the address and the region"
    if code == "CapacityError":
        return (
            f"{doing}: AWS has no such machine free now ({said}); try later, another region, or --spot with --max-wait"
        )
    return f"{doing}: AWS refuses ({code}: {said})"
