"""The shared feed of a search on nodes of the cluster at ADDRESS, as if this machine were none of them."""

from __future__ import annotations

import sys
import time

import numpy as np
import torch

from distributed_training.config import load_config
from distributed_training.launch.ray_cluster import connected, nodes
from distributed_training.training.job import load_data
from distributed_training.tuning.shared_feed import SharedData, SharedFeed, starting

config = load_config(None, ["data.preprocess=loading:slowly", "tuning.share_feed=on", "tuning.feed_workers=1"])
ids = np.arange(50)
with connected(sys.argv[1]) as ray:
    starting.machines = lambda ray: (False, [node.id for node in nodes(ray)])
    with SharedFeed(config, ray) as feed, SharedData(feed.name, config) as data:
        images, labels = data.splits.train.fetch_keyed(ids, 7)
        assert data.splits.train.loaded_here == 0
        mine = load_data(config).train.fetch_keyed(ids, 7)
        assert torch.equal(images, mine[0])
        assert torch.equal(labels, mine[1])
    end = time.monotonic() + 60
    while SharedData(feed.name, config).splits is not None:  # it goes with the search
        assert time.monotonic() < end
        time.sleep(0.1)
