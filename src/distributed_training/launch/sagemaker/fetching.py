"""The model that a job left in S3, brought back into a run's folder here."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from distributed_training.launch.sagemaker.aws import Aws, explained
from distributed_training.launch.sagemaker.request import split_address
from distributed_training.runtime.errors import CloudError

_LARGEST = 2 * 2**40  # bytes that an archive may unpack to
_FILES = 1_000_000


def bring_back(aws: Aws, state: dict[str, Any], runs: Path) -> Path | None:
    """Download and unpack model.tar.gz of a job that has ended; the run's folder, or None if the job left nothing."""
    address = state.get("ModelArtifacts", {}).get("S3ModelArtifacts")
    if not address:
        return None
    bucket, key = split_address(address, "the job's model")
    s3 = aws.client("s3")
    from botocore.exceptions import ClientError

    try:
        size = s3.head_object(Bucket=bucket, Key=key)["ContentLength"]
    except ClientError as error:
        if error.response.get("Error", {}).get("Code") in ("404", "NoSuchKey"):
            return None
        with explained(f"looking at {address}", "s3:GetObject"):
            raise
    runs.mkdir(parents=True, exist_ok=True)
    _check_room(runs, size, address)
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=runs) as folder:
        archive, unpacked = Path(folder, "model.tar.gz"), Path(folder, "run")
        with explained(f"downloading {address}", "s3:GetObject"):
            s3.download_file(bucket, key, str(archive))
        unpack(archive, unpacked)
        if not any(unpacked.iterdir()):
            return None
        return _put(unpacked, runs / str(state["TrainingJobName"]))


def unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive that somebody else has made: nothing outside of the folder, no links out of it, no devices."""
    folder.mkdir(parents=True)
    try:
        with tarfile.open(archive, "r:gz") as tar:
            size = 0
            for number, member in enumerate(tar, 1):
                size += member.size
                if size > _LARGEST or number > _FILES:
                    raise CloudError(f"{archive.name}: it would unpack to more than {_LARGEST} bytes; not unpacked")
            _check_room(folder, size, archive.name)
        with tarfile.open(archive, "r:gz") as tar:
            tar.extractall(folder, filter="data")
    except tarfile.FilterError as error:
        raise CloudError(f"{archive.name}: not unpacked, one of its files would land elsewhere: {error}") from None
    except (tarfile.TarError, EOFError, OSError) as error:
        raise CloudError(f"{archive.name}: cannot be unpacked: {error}; the archive is still in S3") from None


def _put(unpacked: Path, wanted: Path) -> Path:
    """Under the job's name, or with a number behind it where that is taken."""
    names = (wanted, *(wanted.with_name(f"{wanted.name}-{n}") for n in range(2, 1000)))
    final = next(path for path in names if not path.exists())
    unpacked.rename(final)
    return final


def _check_room(folder: Path, size: int, what: str) -> None:
    free = shutil.disk_usage(folder).free
    if size > free:
        raise CloudError(
            f"{what}: {size / 1e9:.1f} GB, and {folder} has {free / 1e9:.1f} GB left; free some space, or choose "
            "another folder with run.root=FOLDER, and fetch it again with --attach"
        )
