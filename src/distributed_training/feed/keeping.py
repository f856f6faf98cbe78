"""What the hub asks of the epoch cache, where there is one: which steps it has, and what loaders have to bring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from distributed_training.data.base import Batch, Share
from distributed_training.feed.arrivals import Arrival
from distributed_training.feed.cache import Allocate, EpochCache
from distributed_training.feed.cache_store import cache_key, files_for
from distributed_training.feed.columns import cut_rows
from distributed_training.feed.planning import EpochPlan, facts_of
from distributed_training.feed.settings import FeedSettings
from distributed_training.runtime.errors import ConfigError
from distributed_training.wire.messages import Join


class Keeping:
    """Nothing is kept unless the settings say so. `share` says which part of every step this side trains on."""

    def __init__(self, settings: FeedSettings, share: Callable[[], Share]) -> None:
        self._settings, self._share = settings, share
        self._steps_per_epoch = 1
        self.cache: EpochCache | None = None
        self.allocate: Allocate = lambda size: memoryview(bytearray(size))
        """Where batches are put together."""
        self.served = 0
        """Steps that needed no transfer."""

    def open(self, plan: EpochPlan, join: Join) -> ConfigError | None:
        """A loader has come; the first one opens the cache. An error where its samples cannot be kept."""
        if self._settings.cache == "off":
            return None
        try:
            self._open(plan, join)
        except ConfigError as error:
            return error
        return None

    def _open(self, plan: EpochPlan, join: Join) -> None:
        settings, folder = self._settings, self._settings.cache_folder
        if join.facts.get("repeatable") is not True:
            raise ConfigError(
                f"feed.cache={settings.cache}: samples of {join.name} have a random part, or could not be tried, so "
                "they may differ from epoch to epoch; do what is random on the GPU side (data.augment, "
                "device_transform), or set feed.cache=off"
            )
        if self.cache is not None:
            return
        facts: dict[str, Any] = {**facts_of(plan), "dataset": join.dataset}
        facts |= {name: join.facts.get(name) for name in ("validation_dataset", "content")}
        opened = None
        if settings.cache == "disk" and folder is not None:
            opened = files_for(folder, cache_key(facts), self._share().rank)
        self.cache, self._steps_per_epoch = EpochCache(plan, settings.cache_bytes, opened), plan.steps

    @property
    def hopeful(self) -> bool:
        """Whether what comes in this epoch may make transfers of the next one needless."""
        return self.cache is not None and self.cache.hopeful

    @property
    def lending(self) -> Share:
        """Which part of every step loaders are to bring: all of it while a cache fills, for later epochs."""
        return Share() if self.cache is not None and self.cache.filling else self._share()

    def expects(self, share: Share) -> bool:
        """Whether loaders may bring this part of a step."""
        return share == self._share() or (self.cache is not None and share == Share())

    def have(self, index: int) -> bool:
        """Whether a step, numbered through all epochs, can be had without a loader."""
        if self.cache is None:
            return False
        return self.cache.holds(*divmod(index, self._steps_per_epoch), self._share())

    def arrival(self, index: int) -> Arrival:
        """Such a step."""
        assert self.cache is not None
        epoch, step = divmod(index, self._steps_per_epoch)
        return Arrival(epoch, step, 0, self.cache.batch(epoch, step, self._share(), self.allocate))

    def keep(self, first: int, steps: int, ids: np.ndarray, data: Any) -> None:
        """Neighbouring steps came, with these samples in all. Called without the hub's lock."""
        if self.cache is not None:
            self.cache.keep(first, steps, ids, data)

    def publish(self, arrivals: list[Arrival]) -> None:
        """These arrivals are known to the hub, whose lock is held: what was kept of them may be used."""
        if self.cache is not None:
            for arrival in arrivals:
                for step in range(arrival.step, arrival.step + arrival.steps):
                    self.cache.publish(arrival.epoch, step)

    def own(self, share: Share, step_ids: np.ndarray, data: Any) -> Batch:
        """The batch of this side from the part of a step that came."""
        own = self._share()
        if share == own:
            return own.batch(step_ids, data)
        return own.batch(step_ids, cut_rows(data, own.rows(len(step_ids)), len(step_ids)))

    def close(self) -> None:
        """Write down what is to last."""
        if self.cache is not None:
            self.cache.close()
