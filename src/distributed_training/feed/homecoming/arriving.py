"""A file on its way in: kept under the name of its hash until it is whole, so that a cut costs what was cut off."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from distributed_training.feed.homecoming.names import TransferError

_READ = 1 << 20


class DamagedError(TransferError):
    """All bytes came, and they are not those that were promised."""


class Arriving:
    """One file. `position` is the first byte that is missing; one thread at a time writes. To be closed or finished."""

    def __init__(self, folder: Path, size: int, digest: bytes, start: Path | None = None) -> None:
        """`start` is a file that this one may begin with. OSError where the disk is full or not to be written."""
        folder.mkdir(parents=True, exist_ok=True)
        self._path, self.size, self._digest = folder / digest.hex(), size, digest
        self.guessed = False
        """Whether it began with a file that may have been another one: if the hash is wrong, that may be why."""
        if not self._path.exists() and start is not None and start.exists() and start.stat().st_size <= size:
            shutil.copyfile(start, self._path)
            self.guessed = True
        self._file = self._path.open("a+b", buffering=0)
        self._hash = hashlib.sha256()
        if self._path.stat().st_size > size:
            self._file.truncate(0)
        self._file.seek(0)
        while data := self._file.read(_READ):
            self._hash.update(data)
        self.position = self._path.stat().st_size
        if (free := shutil.disk_usage(folder).free) < size - self.position:
            self._file.close()
            raise TransferError(
                f"a file of {size / 2**20:,.0f} MiB does not fit: {folder.parent} has {free / 2**20:,.0f} MiB left; "
                "free some space"
            )

    @property
    def complete(self) -> bool:
        """Whether all bytes are there; `finish` says whether they are the right ones."""
        return self.position == self.size

    def write(self, position: int, data: memoryview | bytes) -> None:
        """Append the next bytes."""
        if position != self.position or position + len(data) > self.size:
            raise TransferError(f"bytes {position} to {position + len(data)} came where {self.position} was due")
        written = 0
        while written < len(data):
            written += self._file.write(data[written:])
        self._hash.update(data)
        self.position += len(data)

    def finish(self) -> Path:
        """The file, synced to the disk. DamagedError where its hash is wrong: nothing is left of it then."""
        try:
            os.fsync(self._file.fileno())
        finally:
            self._file.close()
        if not self.complete or self._hash.digest() != self._digest:
            self._path.unlink(missing_ok=True)
            raise DamagedError("its content does not match the hash that was promised")
        return self._path

    def close(self) -> None:
        """Leave it as it is, to be gone on with."""
        self._file.close()
