"""Secrets by reference: the job holds only the name of a parameter or secret, and reads its value with its own role.

`ssm:/team/hf-token` is a parameter of Systems Manager, `secretsmanager:NAME` a secret of Secrets Manager, and
`secretsmanager:NAME#KEY` one value of a secret that holds JSON. ARNs are fine in place of names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from distributed_training.config.errors import ConfigError
from distributed_training.runtime.errors import CloudError

_KINDS = ("ssm", "secretsmanager")


def check_reference(variable: str, reference: str) -> None:
    """Refuse what is no reference, without saying what it is: it may be the secret itself."""
    kind, _, name = reference.partition(":")
    if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", variable):
        raise ConfigError(f"--secret {variable[:40]}: no name of a variable; write --secret HF_TOKEN=ssm:/NAME")
    if kind not in _KINDS or not name.partition("#")[0]:
        raise ConfigError(
            f"--secret {variable}=...: not a reference. Store the value in AWS and name it here: "
            f"--secret {variable}=ssm:/NAME or --secret {variable}=secretsmanager:NAME (docs/sagemaker.md#secrets)"
        )


def fetch_secrets(references: Mapping[str, str], region: str | None) -> dict[str, str]:
    """The values, by variable."""
    if not references:
        return {}
    from distributed_training.launch.sagemaker.aws import Aws

    aws = Aws(region)
    try:
        return {variable: _fetch(aws, variable, reference) for variable, reference in references.items()}
    finally:
        aws.close()


def _fetch(aws: Any, variable: str, reference: str) -> str:
    from distributed_training.launch.sagemaker.aws import explained

    check_reference(variable, reference)
    kind, _, name = reference.partition(":")
    if kind == "ssm":
        with explained(f"reading {variable} from {reference}", "ssm:GetParameter (and kms:Decrypt)"):
            return str(aws.client("ssm").get_parameter(Name=name, WithDecryption=True)["Parameter"]["Value"])
    name, _, key = name.partition("#")
    with explained(f"reading {variable} from {reference}", "secretsmanager:GetSecretValue"):
        value = str(aws.client("secretsmanager").get_secret_value(SecretId=name)["SecretString"])
    if not key:
        return value
    try:
        return str(json.loads(value)[key])
    except (ValueError, KeyError, TypeError):
        raise CloudError(f"reading {variable} from {reference}: the secret holds no JSON with the key {key}") from None
