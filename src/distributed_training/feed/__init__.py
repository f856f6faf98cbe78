"""Batches between machines: loaders on CPU machines dial in to the GPU side, which says who loads which step.

    plan -> worker (loads, packs) -> wire -> server (session, hub, sequencer) -> source -> training loop

`FeedServer` is the GPU side and gives a `BatchSource`; `Loader` is the CPU side.
"""

from distributed_training.feed.buffers import BufferPool
from distributed_training.feed.figures import Figures
from distributed_training.feed.loader import Loader
from distributed_training.feed.pairing import PairingLink
from distributed_training.feed.server import FeedServer
from distributed_training.feed.settings import FeedSettings, LoaderSettings
from distributed_training.feed.source import FeedSource

__all__ = [
    "BufferPool",
    "FeedServer",
    "FeedSettings",
    "FeedSource",
    "Figures",
    "Loader",
    "LoaderSettings",
    "PairingLink",
]
