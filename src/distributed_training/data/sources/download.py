"""One file from the web, checked before anyone sees it under its name."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import urllib.parse
import urllib.request
from pathlib import Path

from distributed_training.runtime.errors import ConfigError, DataError

TIMEOUT = 30.0
"""Seconds without a byte before a download fails."""
CHUNK = 1 << 20


def download(url: str, path: Path, md5: str) -> None:
    """Fetch `url` into `path`. It is written aside and renamed once its checksum is right.

    Several processes may do so at once: each writes its own part file, and the renames replace like by like.
    """
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise ConfigError(f"data.args.url={url!r} must begin with http:// or https://")
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    by_hand = f"get the file by other means and put it at {path}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.md5(usedforsecurity=False)
        with urllib.request.urlopen(url, timeout=TIMEOUT) as response, part.open("wb") as file:
            while chunk := response.read(CHUNK):
                digest.update(chunk)
                file.write(chunk)
        if digest.hexdigest() != md5.lower():
            raise DataError(f"{url}: damaged or another file: checksum {digest.hexdigest()}, not {md5}; {by_hand}")
        os.replace(part, path)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise DataError(f"{url}: download to {path} failed ({error}); {by_hand}") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
