"""The GPU side takes in the checkpoint that a loader brings, before the first step is lent to anybody."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from distributed_training.checkpoint.files import MANIFEST_FILE, STATE_FILE, checkpoint_name
from distributed_training.feed.homecoming.arriving import Arriving, DamagedError
from distributed_training.feed.homecoming.courier import Courier
from distributed_training.feed.homecoming.guest import HomeGuest
from distributed_training.feed.homecoming.names import FileName
from distributed_training.runtime.errors import FeedError
from distributed_training.wire.messages import BlobOffer

_LOOK = 0.25
_ATTEMPTS = 3
T = TypeVar("T")


@dataclass(frozen=True)
class Brought:
    """A checkpoint that a loader has, of a run that did not come to its end."""

    loader: str
    run: str
    """Identity of the run."""
    step: int

    def path(self, file: str) -> str:
        """Where a file of the checkpoint lies in the run's folder."""
        return f"checkpoints/{checkpoint_name(self.step)}/{file}"


class Fetching:
    """Files that a loader brings, taken one by one, whatever happens to the connection. For the training thread."""

    def __init__(self, courier: Courier) -> None:
        self._courier = courier

    def brought(self) -> Brought | None:
        """The checkpoint that a loader brings, if one does. Waits for the worker that would have it."""
        courier = self._courier
        with courier.changed:
            if not courier.expected:
                return None
            homes = self._until(lambda: courier.homes or None, "the loader's first worker")
            home = max(homes, key=lambda one: one.step)
            return Brought(home.name, home.run, home.step) if home.run else None

    def fetch(self, brought: Brought, path: str, folder: Path) -> Path:
        """A file of it, whole and as its hash says; it lies in `folder` then."""
        damaged = 0
        while damaged < _ATTEMPTS:
            with self._courier.changed:
                home, name, offer = self._until(lambda: self._offer(brought, path), f"the offer of {path}")
            name.check_size(offer.size, self._courier.limit)
            arriving = Arriving(folder, offer.size, offer.digest)
            try:
                if not self._take(home, offer, arriving, path):
                    continue  # the connection is gone: the loader comes back, and what came stays
                arrived = arriving.finish()
            except DamagedError:
                damaged += 1
                continue
            finally:
                arriving.close()
            with self._courier.changed:
                home.done(offer.blob, True)
            return arrived
        raise FeedError(
            f"{path} of {brought.loader} did not arrive whole in {_ATTEMPTS} attempts; see what the loader says, or "
            "start it with feed.checkpoints_home=off to begin anew"
        )

    def decline(self, brought: Brought, why: str) -> None:
        """Say that nothing more of it is wanted."""
        with self._courier.changed:
            for home in self._courier.homes:
                if home.run == brought.run:
                    for _, offer in home.offers.values():
                        home.done(offer.blob, False, why)
                    home.offers.clear()

    def has(self, brought: Brought, path: str) -> bool:
        """Whether it brings this file, too."""
        with self._courier.changed:
            return self._offer(brought, path) is not None

    def _offer(self, brought: Brought, path: str) -> tuple[HomeGuest, FileName, BlobOffer] | None:
        """Who offers a file, once the whole checkpoint is offered."""
        needed = {brought.path(STATE_FILE), brought.path(MANIFEST_FILE)}
        for home in self._courier.homes:
            if home.run == brought.run and home.offers.keys() >= needed and path in home.offers:
                return home, *home.offers[path]
        return None

    def _take(self, home: HomeGuest, offer: BlobOffer, arriving: Arriving, path: str) -> bool:
        """Have a file come; False where the connection was lost before all of it was there."""
        with self._courier.changed:
            if not arriving.complete:
                home.pull(offer.blob, arriving)
            self._until(lambda: arriving.complete or home.lost or None, f"the rest of {path}")
        return arriving.complete

    def _until(self, found: Callable[[], T | None], what: str) -> T:
        """Wait for something, under the lock, as long as anything moves."""
        courier = self._courier
        moved, since = courier.moved, time.monotonic()
        while (value := found()) is None:
            if courier.moved != moved:
                moved, since = courier.moved, time.monotonic()
            if time.monotonic() - since > courier.deadline:
                raise FeedError(
                    f"{what} did not come within {courier.deadline:g} s, though a loader said that it keeps a copy of "
                    "the run; see what it does, or start it with feed.checkpoints_home=off"
                )
            courier.changed.wait(_LOOK)
        return value
