"""Secrets that must not travel with the source: files that hold some by their name, and texts that look like one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path

from distributed_training.config.errors import ConfigError
from distributed_training.config.load import secret

SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
"""Variables that hold a secret wherever they are set."""
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|PRIVATE_?KEY|ACCESS_?KEY", re.IGNORECASE)
_SECRET_FILES = (
    ".env",
    ".env.*",
    "*.pem",
    "*.key",
    "*.p12",
    "*.pfx",
    "id_rsa*",
    "id_ed25519*",
    "id_ecdsa*",
    ".netrc",
    "_netrc",
    ".pypirc",
    ".npmrc",
    ".git-credentials",
    "credentials",
    "credentials.json",
    "token",
    "kaggle.json",
)
_SECRET_FOLDERS = (".aws", ".ssh", ".gnupg", ".kaggle", ".azure", ".gcloud")
_HARMLESS = (".env.example", ".env.sample", ".env.template")
_SHAPES = {
    "a Hugging Face token": re.compile(r"\bhf_[A-Za-z0-9]{30,}"),
    "an AWS access key": re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
    "a GitHub token": re.compile(r"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{40,})"),
    "a private key": re.compile(r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----"),
    "a W&B key": re.compile(r"(?i)wandb_?api_?key['\"]?\s*[=:]\s*['\"]?(?:local-)?[0-9a-f]{40}\b"),
}
_LOOKED_AT = 1_000_000  # bytes: no source is longer
_EXAMPLES = ("EXAMPLE", "XXXX")


def is_secret_file(path: Path) -> bool:
    """Whether a file holds secrets, to judge by its name."""
    if path.name in _HARMLESS:
        return False
    return any(fnmatch(path.name, pattern) for pattern in _SECRET_FILES) or any(
        part in _SECRET_FOLDERS for part in path.parts
    )


def is_secret_name(name: str) -> bool:
    """Whether a variable holds a secret, to judge by its name."""
    return bool(_SECRET_NAME.search(name))


def refuse_secrets_in_words(words: Sequence[str]) -> None:
    """Refuse a secret on the command line: it would stand in the job's hyper-parameters, for many to read."""
    for word in words:
        found = _secret_in(word, known_secrets())
        if found:
            name = word.partition("=")[0]
            where = f"{name}=..." if name != word and not _secret_in(name, known_secrets()) else "a word after --"
            raise ConfigError(
                f"{where} holds {found}, and would be shown with the job's hyper-parameters: pass it as a reference, "
                "--secret HF_TOKEN=ssm:/NAME (docs/sagemaker.md#secrets)"
            )


def refuse_secrets_in_files(root: Path, files: Iterable[Path]) -> None:
    """Refuse to pack a file with something in it that looks like a secret."""
    known = known_secrets()
    for file in files:
        path = root / file
        if path.stat().st_size > _LOOKED_AT:
            continue
        content = path.read_bytes()
        if b"\0" in content:
            continue
        for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), 1):
            found = _secret_in(line, known)
            if found:
                raise ConfigError(
                    f"{file}, line {number}: this looks like {found}, and would be uploaded with the source. Take it "
                    f"out, or leave the file here: sagemaker.exclude=['{file}'] (docs/sagemaker.md#secrets)"
                )


def known_secrets() -> dict[str, str]:
    """Values of this environment and of .env that nobody else is to see, and whose they are."""
    found = {secret(name): f"the value of {name}" for name in SECRETS}
    return {value: whose for value, whose in found.items() if value and len(value) >= 8}


def _secret_in(text: str, known: dict[str, str]) -> str:
    for value, whose in known.items():
        if value in text:
            return whose
    for what, shape in _SHAPES.items():
        match = shape.search(text)
        if match and not any(mark in match[0].upper() for mark in _EXAMPLES):
            return what
    return ""
