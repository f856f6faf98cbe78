"""One wait of the training thread for a batch: whether it still makes sense, and what is said meanwhile."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from distributed_training.data.base import ToldToStop
from distributed_training.feed.settings import FeedSettings
from distributed_training.runtime.errors import FeedError

logger = logging.getLogger(__name__)

_SAY_AFTER, _SAY_AGAIN = 1.0, 60.0  # seconds


class StoppedWaiting(FeedError, ToldToStop):
    """Somebody asked this process to stop while training waited for a batch."""


@dataclass
class Waiting:
    """Asked again and again while the wait lasts."""

    what: str
    """What training waits for, for messages."""
    settings: FeedSettings
    grace: float = 0.0
    """Seconds for which a wish to stop is not heeded."""
    since: float = field(default_factory=time.monotonic)
    told: float | None = None
    alone_since: float | None = None
    said: float = 0.0

    def heed(self, told_to_stop: bool) -> None:
        """End the wait by StoppedWaiting if that is the wish for long enough."""
        if told_to_stop:
            now = time.monotonic()
            self.told = self.told or now
            if now - self.told >= self.grace:
                raise StoppedWaiting(f"told to stop while training waited for {self.what}")

    def with_loaders(self, loaders: int, last_arrival: float, holders: list[str]) -> None:
        """Loaders are connected: one of them should have brought something by now."""
        self.alone_since = None
        deadline = self.settings.deadline
        if time.monotonic() - max(last_arrival, self.since) > deadline:
            raise FeedError(
                f"{self.what} did not come within {deadline:g} s though {loaders} loader workers are connected "
                f"(lent to {', '.join(holders) or 'nobody'}); see what they do, or raise run.deadline if batches take "
                "so long"
            )

    def alone(self) -> None:
        """Nobody is connected: say so now and then, and give up in the end."""
        now, absence = time.monotonic(), self.settings.absence
        if self.alone_since is None:
            self.alone_since = now
        seconds = now - self.alone_since
        if seconds > absence:
            raise FeedError(f"no loader came within {absence:g} s; start one with the pairing link of this run")
        if seconds > _SAY_AFTER and now - self.said > _SAY_AGAIN:
            self.said = now
            logger.warning("no loader is connected: training waits for %s (since %.0f s)", self.what, seconds)

    def over(self) -> None:
        """What training waited for is there."""
        if self.said:
            logger.warning("batches come again; training goes on")
