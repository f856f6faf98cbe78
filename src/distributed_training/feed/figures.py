"""What a feed does, in numbers that people and trackers read."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass
class Counts:
    """What a feed counts as it goes; the names are those of `Figures`."""

    since: float = field(default_factory=time.monotonic)
    steps: int = 0
    samples: int = 0
    bytes: int = 0
    waited: float = 0.0
    alone: float = 0.0
    loading: float = 0.0

    def wait_share(self, now: float) -> float:
        """Part of the time so far that training waited for batches."""
        return min(1.0, self.waited / max(now - self.since, 1e-9))


class Figures(NamedTuple):
    """A feed since it began, or since the figures before. Training itself takes them: a tuple is soon made."""

    seconds: float = 0.0
    steps: int = 0
    samples: int = 0
    bytes: int = 0
    """Payload as it travelled."""
    waited: float = 0.0
    """Seconds that training waited for batches."""
    alone: float = 0.0
    """Seconds of these in which no loader was connected."""
    loading: float = 0.0
    """Seconds of all workers together that went into loading the batches."""
    queue: int = 0
    """Steps that are ready."""
    horizon: int = 0
    """Steps that may be prepared ahead."""
    loaders: int = 0
    """Workers connected."""
    shared: int = 0
    """Of these, workers whose batches come through shared memory."""
    duplicates: int = 0
    reissued: int = 0
    refused: int = 0
    """Connections that were not let in."""
    cached: int = 0
    """Steps that were made of samples kept here, and needed no transfer."""

    @property
    def samples_per_second(self) -> float:
        """Samples that training took."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def megabytes_per_second(self) -> float:
        """Payload that arrived."""
        return self.bytes / 1e6 / self.seconds if self.seconds else 0.0

    @property
    def wait_share(self) -> float:
        """Part of the time that training waited for batches."""
        return min(1.0, self.waited / self.seconds) if self.seconds else 0.0

    def since(self, before: Figures) -> Figures:
        """What came since figures taken earlier; counts of what is there now stay as they are."""
        return Figures._make([now - then if adds else now for now, then, adds in zip(self, before, _ADDS_UP)])

    def as_metrics(self) -> dict[str, Any]:
        """Names and numbers for trackers."""
        return {
            "feed_samples_per_second": self.samples_per_second,
            "feed_megabytes_per_second": self.megabytes_per_second,
            "feed_queue": self.queue,
            "feed_wait_share": self.wait_share,
            "feed_loaders": self.loaders,
        }

    def bottleneck(self) -> str:
        """In words: what held training up, and what to change."""
        if not self.steps:
            return "nothing was trained yet"
        if self.wait_share < 0.05:
            return f"the GPU: it waited for batches in {self.wait_share:.1%} of the time"
        if self.alone > self.waited / 2:
            return (
                f"missing loaders: training waited in {self.wait_share:.1%} of the time, for {self.alone:.1f} s with "
                "none connected; keep them running, several of them where one may fail"
            )
        busy = self.loading / self.seconds / max(1, self.loaders)
        if busy > 0.7:
            return (
                f"loading: training waited in {self.wait_share:.1%} of the time and each worker spent {busy:.0%} of it "
                "on loading; start more loader workers, or make the dataset cheaper"
            )
        return (
            f"the network or the connection of the loaders: training waited in {self.wait_share:.1%} of the time while "
            f"workers spent only {busy:.0%} of it on loading, at {self.megabytes_per_second:.0f} MB/s; send smaller "
            "types (uint8 instead of float32), keep samples on this side (feed.cache), or come nearer"
        )


_ADDS_UP = [name not in ("queue", "horizon", "loaders", "shared") for name in Figures._fields]
