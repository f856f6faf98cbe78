"""What a GPU side proves itself by off its own machine, kept so that loaders know it again when it is resumed.

    RUNS/.pairing/29500.json      token, certificate and key of the side that listens at this port; its owner's only

A fresh start makes new ones. A resumed run takes those of the one before it: its loaders still have that link.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from distributed_training.feed.pairing import decode_token, encode_token, new_token
from distributed_training.feed.tls import Certificate, make_certificate
from distributed_training.runtime.errors import DistributedTrainingError

logger = logging.getLogger(__name__)

_FOLDER = ".pairing"


@dataclass(frozen=True)
class Identity:
    """Token and certificate of a GPU side."""

    token: bytes
    certificate: Certificate


def identity_for(root: str | Path, port: int, *, again: bool, token: bytes | None = None) -> Identity:
    """The identity of the GPU side at this port: that of the last start if it comes `again`, else a new one."""
    path = Path(root) / _FOLDER / f"{port}.json"
    kept = _read(path) if again else None
    if kept is not None and token in (None, kept.token):
        return kept
    made = Identity(token or new_token(), make_certificate())
    if port:  # a port that the system chooses is another one next time
        _write(path, made)
    return made


def _read(path: Path) -> Identity | None:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return Identity(decode_token(kept["token"]), Certificate(kept["certificate"], kept["key"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, DistributedTrainingError) as error:
        logger.warning("%s cannot be read (%s): the pairing link will be a new one", path, error)
        return None


def _write(path: Path, made: Identity) -> None:
    kept = {
        "token": encode_token(made.token),
        "certificate": made.certificate.certificate,
        "key": made.certificate.key,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = path.with_suffix(".part")
        part.unlink(missing_ok=True)
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            json.dump(kept, file)
        part.replace(path)
    except OSError as error:
        logger.warning("%s cannot be written (%s): a resumed run will have another pairing link", path, error)
