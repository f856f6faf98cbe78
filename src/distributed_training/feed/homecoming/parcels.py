"""Files on their way out: as they were when they were offered, whatever happens to them meanwhile."""

from __future__ import annotations

import hashlib
import io
import os
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from distributed_training.checkpoint.files import MANIFEST_FILE, STATE_FILE, listed_files
from distributed_training.feed.homecoming.names import CONFIG, GROWING, FileName
from distributed_training.runtime.run_directory import RunDirectory

CHUNK = 64 << 10
"""Bytes that are sent at a time: whatever else is to be said waits for no more than one of these."""
_READ = 1 << 20


class Parcel:
    """The first `size` bytes of an open file. It may be removed or grow meanwhile. To be closed."""

    def __init__(self, name: FileName, file: BinaryIO, size: int, digest: bytes) -> None:
        self.name, self.size, self.digest = name, size, digest
        self._file = file

    def read(self, position: int, most: int) -> bytes:
        """Some bytes; fewer than asked for only at the end."""
        self._file.seek(position)
        return self._file.read(max(0, min(most, self.size - position)))

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


class Sending:
    """A parcel that the other side asked for, from some position on."""

    def __init__(self, blob: int, parcel: Parcel, position: int) -> None:
        self.blob, self.position = blob, position
        self._parcel = parcel

    @property
    def over(self) -> bool:
        """Whether all of it was sent."""
        return self.position >= self._parcel.size

    def next(self, most: int) -> tuple[int, bytes]:
        """(position, bytes) of the next chunk, no longer than `most`."""
        position, data = self.position, self._parcel.read(self.position, min(most, CHUNK))
        if not data:  # cut off behind our back: the other side will see that the hash is wrong
            data = bytes(min(most, CHUNK, self._parcel.size - position))
        self.position += len(data)
        return position, data


def pack_run(run: RunDirectory, identity: str) -> list[Parcel]:
    """The files of a run beside its checkpoints, as far as they are there."""
    parcels = []
    for path in (CONFIG, *GROWING):
        name = FileName(identity, path)
        try:
            if path in GROWING:
                parcels.append(_grown(name, run.path / path))
            else:
                parcels.append(_small(name, run.path / path))
        except FileNotFoundError:
            continue
    return parcels


def pack_checkpoint(checkpoint: Path, identity: str) -> list[Parcel]:
    """The files of a checkpoint, the manifest last: with it the checkpoint is whole. OSError where it is gone."""
    folder = f"checkpoints/{checkpoint.name}"
    with ExitStack() as opened:
        manifest = _small(FileName(identity, f"{folder}/{MANIFEST_FILE}", checkpoint.name), checkpoint / MANIFEST_FILE)
        size, digest = listed_files(checkpoint)[STATE_FILE]
        file = opened.enter_context((checkpoint / STATE_FILE).open("rb"))
        state = Parcel(FileName(identity, f"{folder}/{STATE_FILE}", checkpoint.name), file, size, bytes.fromhex(digest))
        opened.pop_all()
    return [state, manifest]


def _small(name: FileName, path: Path) -> Parcel:
    """A file that may be written anew at any time: what it holds now."""
    data = path.read_bytes()
    return Parcel(name, io.BytesIO(data), len(data), hashlib.sha256(data).digest())


def _grown(name: FileName, path: Path) -> Parcel:
    """A file of lines that grows: up to the last whole line."""
    file = path.open("rb")
    try:
        size = _whole_lines(file)
        digest, left = hashlib.sha256(), size
        file.seek(0)
        while left and (data := file.read(min(_READ, left))):
            digest.update(data)
            left -= len(data)
        return Parcel(name, file, size, digest.digest())
    except BaseException:
        file.close()
        raise


def _whole_lines(file: BinaryIO) -> int:
    """Where the last line ends that is complete."""
    end = os.fstat(file.fileno()).st_size
    while end > 0:
        start = max(0, end - _READ)
        file.seek(start)
        at = file.read(end - start).rfind(b"\n")
        if at >= 0:
            return start + at + 1
        end = start
    return 0
