"""This project: one loader worker with an array dataset, batches in plan order."""

from __future__ import annotations

import functools
import os
from typing import Any

from benchmarks.feed_peers.base import Case, Take, process

NEEDS = ["distributed_training"]


def feed(dataset: Any, case: Case, take: Take, *, shared: bool) -> None:
    """A loader in a process of its own, which forks its worker; the server and the source in this one."""
    from distributed_training.data import Plan
    from distributed_training.feed import FeedServer, Loader, LoaderSettings

    plan = Plan(case.samples, case.rows, 0)
    reading, writing = os.pipe()

    def load() -> None:
        os.close(writing)
        link = os.read(reading, 1000).decode()
        Loader(dataset, plan, link, workers=1, settings=LoaderSettings(shared_memory=shared)).run()

    with process(load), FeedServer(plan, dataset=dataset.fingerprint(), epochs=10**6) as server:
        os.write(writing, str(server.link()).encode())
        source = server.source()
        for epoch in range(10**6):
            for _, batch in source.batches(epoch):
                if not take(*batch.data):
                    return


def run(case: Case, take: Take, *, shared: bool) -> None:
    """Samples in arrays."""
    from distributed_training.data import ArrayDataset

    feed(ArrayDataset(case.arrays()), case, take, shared=shared)


WAYS = {"ours, TCP": functools.partial(run, shared=False), "ours, shared memory": functools.partial(run, shared=True)}
