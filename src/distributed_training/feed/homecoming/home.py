"""The copies of runs that a loader keeps: folders like those of any run, named by what the loader was told to load.

    ROOT/NAME-home       the run that the same loader command fed first
    ROOT/NAME-home-2     the one after that, and so on

A run is known by its identity, whatever its folder is called on the GPU side. The same loader command finds its folder
again, so it can bring the newest checkpoint of a run that did not come to its end to a GPU side that has none.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from distributed_training.checkpoint.files import (
    MANIFEST_FILE,
    STATE_FILE,
    CheckpointInfo,
    adopt,
    listed_files,
)
from distributed_training.checkpoint.store import CheckpointStore
from distributed_training.config import CheckpointConfig
from distributed_training.feed.homecoming.arriving import Arriving
from distributed_training.feed.homecoming.names import GROWING, FileName, TransferError, is_identity
from distributed_training.feed.homecoming.parcels import Parcel, pack_checkpoint, pack_run
from distributed_training.feed.shared import host_id
from distributed_training.runtime.errors import CheckpointError
from distributed_training.runtime.run_directory import RunDirectory
from distributed_training.wire.fields import Fact

logger = logging.getLogger(__name__)

_ARRIVING = ".arriving"
_MOST_FOLDERS = 1000
HERE, ELSEWHERE = "here", "elsewhere"


@dataclass(frozen=True)
class Kept:
    """A run that did not come to its end, and the newest whole checkpoint of it that is here."""

    run: RunDirectory
    identity: str
    checkpoint: CheckpointInfo

    def parcels(self) -> list[Parcel]:
        """What a GPU side needs to go on with it."""
        return [*pack_checkpoint(self.checkpoint.path, self.identity), *pack_run(self.run, self.identity)]


class Home:
    """Where a loader keeps what comes home. Used by one thread at a time, in one process."""

    def __init__(self, root: Path, name: str, keep: CheckpointConfig, *, limit: int, always: bool = False) -> None:
        """
        Args:
            root: folder of all runs.
            name: of the folders that belong to this loader command.
            keep: how many checkpoints stay, and which one is best.
            limit: bytes of the largest checkpoint that is taken.
            always: also from a GPU side on this very machine.
        """
        self._root, self._name, self._keep, self._limit, self._always = root, name, keep, limit, always
        self._locked: dict[Path, int] = {}
        self._good: set[tuple[str, int]] = set()

    # -- what is here

    def facts(self, receives: bool, kept: Kept | None = None) -> dict[str, Fact]:
        """What a worker tells the GPU side when it joins. One worker `receives`, for all of its loader."""
        facts: dict[str, Fact] = {
            "home": HERE if receives else ELSEWHERE,
            "home_host": host_id(),
            "home_always": self._always,
        }
        if kept is not None:
            facts |= {"home_run": kept.identity, "home_step": kept.checkpoint.step}
        return facts

    def newest(self) -> RunDirectory | None:
        """The copy that was begun last."""
        return next(iter(reversed(list(self._folders()))), None)

    def kept(self) -> Kept | None:
        """What can be gone on with: of the run that was begun last, unless it came to its end."""
        run = self.newest()
        identity = identity_of(run) if run is not None else None
        if run is None or identity is None or _is_over(run):
            return None
        checkpoint = self._newest_good(run)
        return Kept(run, identity, checkpoint) if checkpoint is not None else None

    def _newest_good(self, run: RunDirectory) -> CheckpointInfo | None:
        """As `newest_good` of a store; one that was found whole before is not read again."""
        store = CheckpointStore(run.checkpoints, self._keep)
        newest = next(iter(reversed(store.all())), None)
        if newest is not None and _mark(newest.path) in self._good:
            return newest
        good = store.newest_good()
        if good is not None:
            self._good.add(_mark(good.path))
        return good

    def _folders(self) -> Iterator[RunDirectory]:
        for number in range(1, _MOST_FOLDERS):
            path = self._root / (self._name if number == 1 else f"{self._name}-{number}")
            if not path.is_dir():
                return
            yield RunDirectory(path)

    # -- what comes

    def begin(self, name: FileName, size: int, digest: bytes, *, guess: bool = True) -> Arriving | None:
        """Make ready for a file; None where it is here already. TransferError where it is not wanted."""
        name.check_size(size, self._limit)
        run = self._folder_for(name.run)
        if self._is_here(run, name, size, digest):
            return None
        start = run.path / name.path if guess and name.path in GROWING else None
        return Arriving(run.path / _ARRIVING, size, digest, start)

    def commit(self, name: FileName, arrived: Path) -> None:
        """Put a file that came, and is what was promised, into its place. A manifest makes its checkpoint whole."""
        run = self._folder_for(name.run)
        if not name.folder:
            arrived.replace(run.path / name.path)
        elif name.file == MANIFEST_FILE:
            self._commit_checkpoint(run, name.folder, arrived)
        # Tensors stay where they are, under the name of their hash, until their manifest comes.

    def _commit_checkpoint(self, run: RunDirectory, folder: str, manifest: Path) -> None:
        arriving = run.path / _ARRIVING
        aside = arriving / folder
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        try:
            manifest.replace(aside / MANIFEST_FILE)
            _, digest = listed_files(aside)[STATE_FILE]
            (arriving / bytes.fromhex(digest).hex()).rename(aside / STATE_FILE)
            info = adopt(aside, run.checkpoints / folder)
        except FileNotFoundError:
            raise TransferError(f"the manifest of {folder} came without the tensors that it names") from None
        except CheckpointError as error:
            raise TransferError(str(error)) from None
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        self._good.add(_mark(info.path))
        store = CheckpointStore(run.checkpoints, self._keep)
        store.prune(max(info.step, *(one.step for one in store.all())))
        shutil.rmtree(arriving, ignore_errors=True)  # parts of others that nobody will go on with
        logger.debug("%s came home: %s", folder, info.path)

    def _is_here(self, run: RunDirectory, name: FileName, size: int, digest: bytes) -> bool:
        file = run.path / name.path
        try:
            if name.file == STATE_FILE:
                return listed_files(file.parent)[STATE_FILE] == (size, digest.hex())
            if file.stat().st_size != size:
                return False
            with file.open("rb") as stream:
                return hashlib.file_digest(stream, "sha256").digest() == digest
        except (OSError, CheckpointError):
            return False

    def _folder_for(self, identity: str) -> RunDirectory:
        """The copy of this run: that which was begun before, or a new one. No other process may write to it."""
        free = 1
        for run in self._folders():
            free += 1
            if identity_of(run) == identity:
                return self._lock(run)
        run = RunDirectory(self._root / (self._name if free == 1 else f"{self._name}-{free}"))
        run.checkpoints.mkdir(parents=True)
        run.identity_file.write_text(identity, encoding="ascii")
        logger.info("checkpoints of this training come to %s", run.path)
        return self._lock(run)

    def _lock(self, run: RunDirectory) -> RunDirectory:
        if run.path not in self._locked:
            end = os.open(run.home_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(end, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(end)
                raise TransferError(f"another loader here keeps the copy of this run, {run.path}") from None
            os.utime(end)
            self._locked[run.path] = end
        return run

    def close(self) -> None:
        """Let others write to the copies."""
        for end in self._locked.values():
            with suppress(OSError):
                os.close(end)
        self._locked.clear()


def identity_of(run: RunDirectory) -> str | None:
    """Names the run of a folder, the same for all its copies; None where it has no name yet."""
    try:
        text = run.identity_file.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return text if is_identity(text) else None


def _is_over(run: RunDirectory) -> bool:
    """Whether the last thing that is known of a run is that it came to its end."""
    last = None
    for event in run.events():
        if event.get("event") in ("start", "finish"):
            last = event
    return last is not None and last["event"] == "finish" and last.get("status") in ("completed", "stopped early")


def _mark(checkpoint: Path) -> tuple[str, int]:
    """Changes when a checkpoint is replaced."""
    try:
        return str(checkpoint), (checkpoint / MANIFEST_FILE).stat().st_mtime_ns
    except OSError:
        return str(checkpoint), -1
