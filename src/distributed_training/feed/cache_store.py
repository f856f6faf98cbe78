"""Where an epoch cache keeps its samples: in memory, or in files that outlast the process.

    FOLDER/rank-0/KEY/lock              held by the run that uses it
    FOLDER/rank-0/KEY/train/shape.json  how a sample is built
    FOLDER/rank-0/KEY/train/0.npy       a matrix of bytes, a row a sample: the first tensor of every sample
    FOLDER/rank-0/KEY/train/1.bin       bytes of any length, one after the other; 1.npy says where each begins and ends
    FOLDER/rank-0/KEY/train/held.npy    a hash of each sample; 0 for those that are not here

KEY is made of the plan and of all that loaders say of their data. Rows are written in place; only `held.npy` makes them
count, and it is replaced by a rename. What does not have its hash when the cache is opened was never finished, or was
damaged, and is fetched anew: so no write needs to wait for the disk. A key that is not the run's own makes room.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from distributed_training.feed.columns import Column, Matrix, Pieces, Shape, as_bytes, leaf_shapes, row_width
from distributed_training.runtime.errors import ConfigError

logger = logging.getLogger(__name__)

_COMMIT_EVERY = 5.0  # seconds
_KEY = re.compile(r"[0-9a-f]{32}")

Kept = tuple[Shape, list[Column], np.ndarray]
"""How a sample is built, its columns, and which samples they hold."""


class Store(ABC):
    """The place of one part of a cache. Its owner's lock guards it."""

    size = 0
    """Bytes that were here when it was opened."""

    def kept(self, samples: int) -> Kept | None:
        """What an earlier run has left, for a dataset of so many samples."""
        return None

    @abstractmethod
    def begin(self, shape: Shape, samples: int) -> list[Column]:
        """Columns for samples that are built so."""

    def added(self, ids: np.ndarray, columns: list[Column]) -> None:  # noqa: B027 (nothing lasts in memory)
        """Samples were put into the columns."""

    def commit(self) -> None:  # noqa: B027
        """Make what was added last."""

    def close(self) -> None:  # noqa: B027
        """Let go of it."""


class MemoryStore(Store):
    """Memory of this process; pages are taken as they are filled."""

    def begin(self, shape: Shape, samples: int) -> list[Column]:
        return [
            Matrix(leaf, np.empty((samples, row_width(leaf)), np.uint8))
            if leaf[0] in ("tensor", "array")
            else Pieces(leaf)
            for leaf in leaf_shapes(shape)
        ]


def cache_key(facts: Mapping[str, Any]) -> str:
    """A name for the samples that loaders with these facts bring."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def files_for(folder: Path, key: str, rank: int) -> Callable[[str], Store]:
    """Opens the parts of a cache on disk. Only one run at a time can have it."""
    own = folder / f"rank-{rank}" / key
    try:
        own.mkdir(parents=True, exist_ok=True)
        lock = _lock(own)
    except OSError as error:
        raise ConfigError(
            f"feed.cache=disk: cannot write to {own} ({error.strerror}); free it, or set run.root"
        ) from None
    if lock is None:
        raise ConfigError(
            f"feed.cache=disk: another run uses {own} just now; set another run.root, or feed.cache=memory"
        )
    for other in own.parent.iterdir():
        if other.name != key and _KEY.fullmatch(other.name):
            _remove_unused(other)
    return lambda name: DiskStore(own / name, lock)


def _lock(folder: Path) -> IO[bytes] | None:
    file = (folder / "lock").open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def _remove_unused(folder: Path) -> None:
    try:
        lock = _lock(folder)
        if lock is not None:
            with lock:
                shutil.rmtree(folder)
    except OSError as error:
        logger.warning("feed.cache: %s cannot be removed: %s", folder, error.strerror)


class DiskStore(Store):
    """Files in a folder of their own."""

    def __init__(self, folder: Path, lock: IO[bytes]) -> None:
        self._folder, self._lock = folder, lock  # the lock is held as long as one part lives
        self._hashes: np.ndarray | None = None
        self._changed = 0.0

    def kept(self, samples: int) -> Kept | None:
        try:
            shape = json.loads((self._folder / "shape.json").read_text(encoding="utf-8"))
            hashes = np.load(self._folder / "held.npy", allow_pickle=False)
            columns = [_open(self._folder / str(n), leaf, samples) for n, leaf in enumerate(leaf_shapes(shape))]
            if hashes.shape != (samples,) or hashes.dtype != np.uint64 or not columns:
                raise ValueError("it is of another dataset")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            logger.warning("feed.cache: %s cannot be used and is made anew: %s", self._folder, error)
            return None
        for sample in np.flatnonzero(hashes).tolist():
            if _hash(columns, sample) != int(hashes[sample]):
                hashes[sample] = 0
        held = hashes != 0
        self._hashes = hashes
        self.size = sum(len(column.piece(sample)) for sample in np.flatnonzero(held).tolist() for column in columns)
        return shape, columns, held

    def begin(self, shape: Shape, samples: int) -> list[Column]:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        (self._folder / "shape.json").write_text(json.dumps(shape), encoding="utf-8")
        self._hashes = np.zeros(samples, np.uint64)
        return [_make(self._folder / str(number), leaf, samples) for number, leaf in enumerate(leaf_shapes(shape))]

    def added(self, ids: np.ndarray, columns: list[Column]) -> None:
        assert self._hashes is not None
        self._hashes[ids] = [_hash(columns, sample) for sample in ids.tolist()]
        now = time.monotonic()
        self._changed = self._changed or now
        if now - self._changed > _COMMIT_EVERY:
            self.commit()

    def commit(self) -> None:
        if self._hashes is None or not self._changed:
            return
        beside = self._folder / "held.npy.new"
        with beside.open("wb") as file:
            np.save(file, self._hashes, allow_pickle=False)
        os.replace(beside, self._folder / "held.npy")
        self._changed = 0.0

    def close(self) -> None:
        self._lock.close()


def _hash(columns: list[Column], sample: int) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for column in columns:
        digest.update(column.piece(sample))
    return int.from_bytes(digest.digest(), "little") or 1


def _make(path: Path, leaf: Shape, samples: int) -> Column:
    if leaf[0] in ("tensor", "array"):
        shape = (samples, row_width(leaf))
        memory = np.lib.format.open_memmap(path.with_suffix(".npy"), "w+", np.uint8, shape)
        return FileMatrix(leaf, path.with_suffix(".npy"), memory)
    places = np.lib.format.open_memmap(path.with_suffix(".npy"), "w+", np.int64, (samples, 2))
    with path.with_suffix(".npy").open("r+b") as file:  # to write to mapped memory without room for it would be fatal
        os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
    path.with_suffix(".bin").touch()
    return FilePieces(leaf, path.with_suffix(".bin"), places)


def _open(path: Path, leaf: Shape, samples: int) -> Column:
    memory = np.load(path.with_suffix(".npy"), mmap_mode="r+", allow_pickle=False)
    tensor = leaf[0] in ("tensor", "array")
    expected: tuple[Any, Any] = ((samples, row_width(leaf)), np.uint8) if tensor else ((samples, 2), np.int64)
    if (memory.shape, memory.dtype) != expected:
        raise ValueError(f"{path}.npy is not what shape.json says")
    if tensor:
        return FileMatrix(leaf, path.with_suffix(".npy"), memory)
    return FilePieces(leaf, path.with_suffix(".bin"), memory)


class FileMatrix(Matrix):
    """Rows of bytes in a file, read where they are mapped; written by calls, which say so when the disk is full."""

    def __init__(self, shape: Shape, path: Path, memory: np.memmap[Any, Any]) -> None:
        super().__init__(shape, memory)
        self._file, self._start = path.open("r+b", buffering=0), int(memory.offset)

    def put(self, ids: np.ndarray, leaf: Any, chosen: np.ndarray) -> None:
        rows = as_bytes(leaf).numpy()
        for sample, row in zip(ids.tolist(), chosen.tolist()):
            _write(self._file, rows[row].data, self._start + sample * rows.shape[1])

    def close(self) -> None:
        self._file.close()


def _write(file: IO[bytes], piece: memoryview | bytes, at: int) -> None:
    written = 0
    while written < len(piece):
        written += os.pwrite(file.fileno(), piece[written:], at + written)


class FilePieces(Pieces):
    """Bytes or texts of any length in one file."""

    def __init__(self, shape: Shape, path: Path, places: np.ndarray) -> None:
        super().__init__(shape)
        self._places = places
        self._file = path.open("r+b", buffering=0)
        self._end = os.fstat(self._file.fileno()).st_size

    def put(self, ids: np.ndarray, leaf: Any, chosen: np.ndarray) -> None:
        for sample, row in zip(ids.tolist(), chosen.tolist()):
            piece = leaf[row].encode() if self._text else leaf[row]
            _write(self._file, piece, self._end)
            self._places[sample] = (self._end, len(piece))
            self._end += len(piece)

    def take(self, ids: np.ndarray, allocate: Callable[[int], memoryview]) -> Any:
        found = [bytes(self.piece(sample)) for sample in ids.tolist()]
        return [piece.decode() for piece in found] if self._text else found

    def close(self) -> None:
        self._file.close()

    def piece(self, sample: int) -> memoryview:
        start, size = self._places[sample].tolist()
        if not 0 <= start <= start + size <= self._end:
            return memoryview(b"")  # damaged: it will not have its hash
        return memoryview(os.pread(self._file.fileno(), size, start))
