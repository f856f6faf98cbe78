"""The `feed` section of the config as the settings of the two sides of a feed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distributed_training.config import Config
from distributed_training.feed.settings import MEBI, FeedSettings, LoaderSettings

_AHEAD = 30.0  # seconds
_CACHE = ".feed-cache"


def feed_settings(config: Config, ranks: int = 1) -> FeedSettings:
    """For the GPU side. Where other ranks wait for this one it speaks before they do: it knows more."""
    feed, deadline = config.feed, config.run.deadline
    if ranks > 1:
        deadline -= min(_AHEAD, 0.4 * deadline)
    return FeedSettings(
        ca_file=config.feed.ca_file,
        memory=feed.memory_mb * MEBI,
        deadline=deadline,
        absence=feed.wait_for_loaders,
        max_steps_ahead=feed.max_steps_ahead,
        on_bad_sample=feed.on_bad_sample,
        shared_memory=feed.shared_memory,
        cache=feed.cache,
        cache_bytes=feed.cache_mb * MEBI,
        cache_folder=Path(config.run.root) / _CACHE,
        checkpoints_home=feed.checkpoints_home,
        max_checkpoint=feed.max_checkpoint_mb * MEBI,
    )


def loader_settings(config: Config) -> LoaderSettings:
    """For the CPU side."""
    feed = config.feed
    return LoaderSettings(
        ca_file=config.feed.ca_file,
        memory=feed.loader_memory_mb * MEBI,
        patience=feed.wait_for_server,
        compression=feed.compression,
        shared_memory=feed.shared_memory,
    )


def client_options(config: Config, **others: Any) -> dict[str, Any]:
    """What `run_validation` and `run_inference` take from a config, unless `others` say otherwise."""
    return {
        "batch_size": config.training.batch_size,
        "num_workers": config.data.num_workers,
        "on_bad_sample": config.feed.on_bad_sample,
        "settings": loader_settings(config),
        **others,
    }
