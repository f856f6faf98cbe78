"""The GPU side's end of checkpoints that go home: what is to be sent, and which loader gets it.

The first loader that asks gets the copy; if it leaves, the next one does. Of checkpoints that are made faster than the
link takes them, the newest is sent when the one before it has arrived. One lock guards all; connections ask for the
next file, training only says where the run's folder is and, at the end, waits until the last file is at home.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from distributed_training.checkpoint.files import MANIFEST_FILE
from distributed_training.checkpoint.store import CheckpointStore
from distributed_training.config import CheckpointConfig
from distributed_training.feed.homecoming.home import ELSEWHERE, HERE
from distributed_training.feed.homecoming.parcels import Parcel, pack_checkpoint, pack_run
from distributed_training.feed.shared import host_id
from distributed_training.runtime.errors import CheckpointError
from distributed_training.runtime.run_directory import RunDirectory
from distributed_training.wire.fields import Fact

if TYPE_CHECKING:
    from distributed_training.feed.homecoming.guest import HomeGuest

logger = logging.getLogger(__name__)

Choice = Literal["auto", "on", "off"]
_LOOK = 0.25  # seconds between two looks at the run's folder
_ATTEMPTS = 3
_ENDING = 5.0
Mark = tuple[str, int, int]
"""A checkpoint as it is now: changes if another one takes its place."""


@dataclass
class Delivery:
    """Files that are sent one after the other."""

    parcels: list[Parcel]
    mark: Mark | None
    """The checkpoint that is at home when all have arrived."""
    last: bool = False
    """Whether nothing comes after it."""
    at: int = 0
    blob: int = 0
    """Number of the file that is offered now; 0 for none."""

    def close(self) -> None:
        """Let go of the files."""
        for parcel in self.parcels:
            parcel.close()


class Courier:
    """Sends the files of one run. Methods take the lock themselves."""

    def __init__(self, choice: Choice, limit: int, deadline: float) -> None:
        self.choice, self.limit, self.deadline = choice, limit, deadline
        self.changed = threading.Condition()
        self.homes: list[HomeGuest] = []
        """Connections to loaders that keep a copy, those that came first in front. Looked at under `changed`."""
        self.expected = False
        """Whether a loader has said that one of its workers receives checkpoints."""
        self.moved = 0
        """Grows with everything that is sent or received: a sign that a wait makes sense."""
        self._run: RunDirectory | None = None
        self._identity = ""
        self._keep = CheckpointConfig()
        self._delivery: Delivery | None = None
        self._delivered: set[Mark] = set()
        self._looked: set[Mark | None] | None = None
        self._failures = self._blobs = 0
        self._said_no_copy = False
        self._ending = self._complete = self._closed = self._unwanted = False
        self._thread: threading.Thread | None = None

    # -- connections

    def wants(self, facts: Mapping[str, Fact], ranks: int = 1) -> bool:
        """Whether the worker with these facts receives the run's files. Notes that its loader keeps a copy."""
        here = facts.get("home")
        if self.choice == "off" or here not in (HERE, ELSEWHERE):
            return False
        if ranks > 1 and "workers" in facts:  # any of its workers may have been called by any rank
            self._say_no_copy()
            return False
        apart = not host_id() or facts.get("home_host") != host_id()
        if self.choice != "on" and facts.get("home_always") is not True and not apart:
            return False  # the run's folder is on that machine already
        with self.changed:
            self.expected = True
        return here == HERE

    def _say_no_copy(self) -> None:
        with self.changed:
            say, self._said_no_copy = not self._said_no_copy, True
        if say:
            logger.warning(
                "a loader that listens gets no copy of the checkpoints of a job of several ranks; they are in the "
                "run's folder here. A loader that dials (dtrain feed --to) gets one"
            )

    def join(self, home: HomeGuest) -> None:
        """A loader that keeps a copy is there."""
        with self.changed:
            self.homes.append(home)
            self._unwanted = False
            self.changed.notify_all()

    def leave(self, home: HomeGuest) -> None:
        """A connection ended. What it was to get, the next one gets."""
        with self.changed:
            if home in self.homes:
                first = self.homes[0] is home
                self.homes.remove(home)
                if first:
                    self._start_over()
            self.changed.notify_all()

    def _start_over(self) -> None:
        """Another connection gets the files. It says of each what it has of it."""
        self._delivered.clear()
        self._looked = None
        self._failures, self._complete = 0, False
        if self._delivery is not None:
            self._delivery.at = self._delivery.blob = 0
        if self.homes:
            self.homes[0].wake()

    def next_parcel(self, home: HomeGuest) -> tuple[int, Parcel] | None:
        """(number, file) to be offered now, if there is one."""
        with self.changed:
            delivery = self._delivery
            if delivery is None or delivery.blob or not self.homes or self.homes[0] is not home:
                return None
            self._blobs += 1
            delivery.blob = self._blobs
            return delivery.blob, delivery.parcels[delivery.at]

    def answered(self, home: HomeGuest, blob: int, good: bool, text: str) -> None:
        """A loader has the file, or does not want it."""
        with self.changed:
            self.moved += 1
            delivery = self._delivery
            if delivery is None or delivery.blob != blob or not self.homes or self.homes[0] is not home:
                return
            delivery.blob = 0
            if not good:
                self._refused(home, delivery, text)
            elif delivery.at + 1 < len(delivery.parcels):
                delivery.at += 1
                home.wake()
            else:
                self._arrived(home, delivery)
            self.changed.notify_all()

    def _refused(self, home: HomeGuest, delivery: Delivery, text: str) -> None:
        self._failures += 1
        logger.warning("%s: %s did not come home: %s", home.name, delivery.parcels[delivery.at].name.path, text)
        self._drop()  # made anew: the files may have changed
        if self._failures >= _ATTEMPTS:
            logger.warning("%s is sent no more files of this run", home.name)
            self.homes.remove(home)
            self._unwanted = not self.homes
            self._start_over()

    def _arrived(self, home: HomeGuest, delivery: Delivery) -> None:
        self._failures = 0
        if delivery.mark is not None:
            self._delivered.add(delivery.mark)
            logger.debug("%s has %s", home.name, Path(delivery.mark[0]).name)
        self._complete = delivery.last
        self._drop()

    def _drop(self) -> None:
        if self._delivery is not None:
            self._delivery.close()
            self._delivery = None

    # -- training

    def begin(self, run: RunDirectory, identity: str, keep: CheckpointConfig) -> None:
        """Training writes to this folder from now on."""
        with self.changed:
            self._run, self._identity, self._keep = run, identity, keep
            self._said_no_copy = False
        self._ending = self._complete = False
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="checkpoints home", daemon=True)
            self._thread.start()

    def finish(self) -> bool:
        """Training has written its last file: wait until all is at home. False where it is not, after a while."""
        with self.changed:
            if self._run is None or not self.expected:
                return True
            self._ending = True
            self.changed.notify_all()
            if not self.homes:
                seconds = self.deadline
                logger.warning("the loader that keeps a copy of this run is away; waiting up to %g s for it", seconds)
            moved, since = -1, time.monotonic()
            while not (self._complete or self._closed or self._unwanted):
                if self.moved != moved:
                    moved, since = self.moved, time.monotonic()
                if time.monotonic() - since > self.deadline:
                    return False
                self.changed.wait(_LOOK)
            return self._complete

    def close(self) -> None:
        """Send nothing more. Safe to call twice."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()
        if self._thread is not None:
            self._thread.join(_ENDING)
        with self.changed:
            self._drop()

    # -- the thread

    def _watch(self) -> None:
        """Look for what is to be sent next."""
        while True:
            with self.changed:
                if self._closed:
                    return
                run, ending = self._run, self._ending
                idle = self._delivery is None and not self._complete and bool(self.homes)
            delivery = self._next(run, ending) if idle and run is not None else None
            with self.changed:
                if delivery is not None:
                    if self._closed or self._delivery is not None or not self.homes:
                        delivery.close()
                    else:
                        self._delivery = delivery
                        self.homes[0].wake()
                        continue
                if not self._closed:
                    self.changed.wait(_LOOK)

    def _next(self, run: RunDirectory, ending: bool) -> Delivery | None:
        """The newest checkpoint, then the best one, then what else belongs to the run when it is over."""
        marks = {_mark(path) for path in run.checkpoints.glob("step-*")}
        if marks == self._looked and not ending:
            return None  # manifests may be long: they are read only when something has changed
        store = CheckpointStore(run.checkpoints, self._keep)
        everything = store.all()
        best = store.best() if self._keep.keep_best else None
        for info in (everything[-1] if everything else None, best):
            mark = _mark(info.path) if info is not None else None
            if info is None or mark is None or mark in self._delivered:
                continue
            try:
                first = pack_run(run, self._identity)  # the ledger before the checkpoint: it must reach as far
                return Delivery([*first, *pack_checkpoint(info.path, self._identity)], mark)
            except (OSError, CheckpointError) as error:
                logger.debug("%s cannot be sent: %s", info.path, error)  # pruned meanwhile: look again
                return None
        self._looked = marks
        if ending:
            rest = pack_run(run, self._identity)
            if rest:
                return Delivery(rest, None, last=True)
        return None


def _mark(checkpoint: Path) -> Mark | None:
    try:
        facts = (checkpoint / MANIFEST_FILE).stat()
    except OSError:
        return None
    return str(checkpoint), facts.st_ino, facts.st_mtime_ns
